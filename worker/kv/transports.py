"""The transports, the best first: what --kv-transport may name, and where each is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.wings import from_wing, require_wing

if TYPE_CHECKING:
    from kvstore.transports.transport import Transport

AUTO = "auto"
# Found when a worker starts: who only reads settings needs no torch.
TRANSPORTS = {
    "cuda_ipc": "worker.cuda_ipc.transport:CudaIpcTransport",
    "nccl": "worker.nccl.transport:NcclTransport",
    "shm": "kvstore.transports.shm.reader:ShmTransport",
    "tcp": "kvstore.transports.tcp.reader:TcpTransport",
    "nixl": "kvstore.transports.nixl.reader:NixlTransport",
}


def load_transports(wanted: str) -> list[type[Transport]]:
    """Import those that are here, the best first. Raises ConfigError when `wanted`, if it names one, is not."""
    if wanted != AUTO:
        require_wing(TRANSPORTS[wanted].partition(":")[0], f"--kv-transport {wanted}")
    return [kind for path in TRANSPORTS.values() if (kind := from_wing(path))]
