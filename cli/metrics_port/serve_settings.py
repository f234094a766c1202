"""Settings of `serve` for metrics ports."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting


@dataclass(frozen=True)
class MetricsPortSettings:
    metrics_port: int = setting(
        0, "Prometheus port of the first worker; prefill workers, decode workers, the node agent and the router take "
        "it and the next ones; 0: none (the router has /metrics on its own port, too, where it may need the API key)"
    )  # fmt: skip
