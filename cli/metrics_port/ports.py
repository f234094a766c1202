"""The metrics port of each service of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from cli.cluster.plan import ClusterConfig, ServeConfig
from cli.cluster.ports import LOOPBACK, check_port
from cli.metrics_port.serve_settings import MetricsPortSettings
from common.errors import ConfigError
from router.metrics_port.settings import RouterMetricsSettings

MAX_PORT = (1 << 16) - 1


def metrics_ports(serve: ServeConfig, names: Sequence[str]) -> dict[str, int]:
    """Return the metrics ports of the services; empty without any. Raises ConfigError if there are too few ports."""
    first = serve.of(MetricsPortSettings).metrics_port
    if not 0 <= first <= MAX_PORT - len(names) + 1:
        raise ConfigError(f"--metrics-port {first}: choose 1 to 65535, with room for all services")
    return {name: first + index for index, name in enumerate(names)} if first else {}


def check_metrics_ports(config: ClusterConfig) -> None:
    """Raise ConfigError for a port that another program uses, or that the cluster needs twice."""
    of_router = config.router.of(RouterMetricsSettings).metrics_host or config.router.host
    for name, port in config.metrics_ports.items():
        if port == config.router.port:
            raise ConfigError(f"--metrics-port gives {name} port {port}, which is the router's: choose another")
        check_port(of_router if name == "router" else LOOPBACK, port, "--metrics-port")
