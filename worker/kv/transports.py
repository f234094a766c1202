"""The transports, the best first: what --kv-transport may name, and where each is found."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kvstore.transports.transport import Transport

AUTO = "auto"
# Found when a worker starts: who only reads settings needs no torch.
TRANSPORTS = {
    "cuda_ipc": "kvstore.transports.cuda_ipc.reader:CudaIpcTransport",
    "nccl": "worker.nccl.transport:NcclTransport",
    "shm": "kvstore.transports.shm.reader:ShmTransport",
    "tcp": "kvstore.transports.tcp.reader:TcpTransport",
    "nixl": "kvstore.transports.nixl.reader:NixlTransport",
}


def load_transports() -> list[type[Transport]]:
    """Import all of them, the best first."""
    found = (path.split(":") for path in TRANSPORTS.values())
    return [cast("type[Transport]", getattr(import_module(module), name)) for module, name in found]
