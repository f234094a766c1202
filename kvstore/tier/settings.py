"""Settings of the node agent."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.config import setting
from common.errors import ConfigError
from common.logging import FORMAT_HELP, FORMATS, LEVEL_HELP, LEVELS
from common.net.hosts import check_cluster_token


@dataclass(frozen=True)
class AgentConfig:
    """The node agent: holds the host-memory tier that the workers of this host share."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(50050, "gRPC port, for health checks; 0: any free one")
    socket: str = setting("", "Unix socket for the workers of this host; empty: agent.sock in a private directory")
    cluster_token: str = setting("", "secret that internal calls must carry; needed beyond loopback")
    host_tier_gb: float = setting(1.0, "host memory for KV blocks, of all models together; 0: none")
    region_gb: float = setting(0.0, "host memory for one model's KV blocks; 0: what is left of --host-tier-gb")
    metrics_port: int = setting(0, "Prometheus port; 0: none")
    drain_grace_seconds: float = setting(5.0, "time that open calls get after SIGTERM")
    log_level: str = setting("info", LEVEL_HELP, choices=LEVELS)
    log_format: str = setting("text", FORMAT_HELP, choices=FORMATS)

    def __post_init__(self) -> None:
        check_cluster_token(self.cluster_token)
        if self.host_tier_gb < 0 or self.region_gb < 0 or self.drain_grace_seconds < 0:
            raise ConfigError("--host-tier-gb, --region-gb and --drain-grace-seconds must not be negative")

    @property
    def socket_path(self) -> Path:
        """The socket that workers connect to: as set, or a private path that is the same for all processes of this
        user."""
        if self.socket:
            return Path(self.socket)
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        return Path(base) / f"mini-infer-{os.getuid()}" / "agent.sock"
