"""Settings of a worker's metrics port."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting


@dataclass(frozen=True)
class WorkerMetricsSettings:
    metrics_port: int = setting(0, "port for Prometheus and for health checks by HTTP (/readyz); 0: none")
