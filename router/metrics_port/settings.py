"""Settings of the router's metrics port."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import require, setting


@dataclass(frozen=True)
class RouterMetricsSettings:
    metrics_port: int = setting(0, "another Prometheus port, where no key is asked for; 0: none")
    metrics_host: str = setting("", "address of the router's --metrics-port; empty: --host")

    def __post_init__(self) -> None:
        is_port = 0 <= self.metrics_port < 1 << 16
        require(is_port, f"--metrics-port {self.metrics_port}: choose 1 to 65535, not --port (0: none)")
