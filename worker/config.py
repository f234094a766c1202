"""Settings of a worker process; the engine's settings are `EngineConfig`, on the same command line.

Reading settings needs no torch: transports are imported when a worker starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.config import Settings, check_not_negative, check_positive, setting, with_wings
from common.logging import FORMAT_HELP, FORMATS, LEVEL_HELP, LEVELS
from common.net.hosts import check_cluster_token

AUTO = "auto"
# The values of --kv-transport, best first, and the class of each.
TRANSPORTS = {
    "cuda_ipc": "worker.cuda_ipc.transport:CudaIpcTransport",
    "nccl": "worker.nccl.transport:NcclTransport",
    "shm": "kvstore.transports.shm:ShmTransport",
    "tcp": "kvstore.transports.tcp.reader:TcpTransport",
    "nixl": "kvstore.transports.nixl.reader:NixlTransport",
}


@with_wings("worker")
@dataclass(frozen=True)
class WorkerConfig(Settings):
    """Worker settings."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "gRPC port; 0: any free one")
    worker_id: str = setting("", "name in metrics and logs; empty: role and port")
    advertise_host: str = setting("", "name under which other hosts reach this worker; empty: --host")
    run_dir: str = setting("", "directory for Unix sockets, shared by the workers of a host; empty: a private one")
    agent_socket: str = setting("", "Unix socket of this host's node agent; empty: none")
    cluster_token: str = setting("", "secret that internal calls must carry; needed beyond loopback")
    kv_lease_seconds: float = setting(10.0, "how long a prompt's KV waits for its reader between renewals")
    kv_transport: str = setting(
        AUTO, "how KV comes from peers; auto: the best that both sides have",
        choices=(AUTO, *TRANSPORTS),
    )  # fmt: skip
    drain_grace_seconds: float = setting(30.0, "time that open requests get after SIGTERM")
    log_level: str = setting("info", LEVEL_HELP, choices=LEVELS)
    log_format: str = setting("text", FORMAT_HELP, choices=FORMATS)

    def __post_init__(self) -> None:
        check_cluster_token(self.cluster_token)
        check_not_negative(self, "drain_grace_seconds")
        check_positive(self, "kv_lease_seconds")
        self.check_together()
