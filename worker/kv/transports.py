"""The transports, the best first: what --kv-transport may name, and where each is found."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from common.wings import has_wing, require_wing

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
    found = {kind: path.split(":") for kind, path in TRANSPORTS.items()}
    if wanted != AUTO:
        require_wing(found[wanted][0], f"--kv-transport {wanted}")
    return [
        cast("type[Transport]", getattr(import_module(module), name))
        for module, name in found.values()
        if has_wing(module)
    ]
