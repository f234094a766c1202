"""Where the memory of KV pools comes from: a seam between an engine and the process it runs in."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.kv.memory import allocate_pool
from kvstore.layout import PoolGeometry
from kvstore.transports.shared_memory import create_memfd


class PoolMemory(Protocol):
    """Gives the pool its bytes."""

    agent_socket: str
    """Unix socket of the node agent that has host memory for blocks; empty: none."""

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
        """A zeroed tensor, see PoolGeometry."""
        ...

    def allocate_for_rank(self, geometry: PoolGeometry) -> int:
        """A descriptor of zeroed host memory for the pool of a rank in another process."""
        ...

    shares_device_pools: bool
    """Whether pools of other ranks' GPUs are allocated so that this process can map them, and are given to it."""

    def adopt_for_rank(self, geometry: PoolGeometry, device: torch.device, fd: int) -> None:
        """Take over the pool that a rank in another process has allocated on `device`, and its descriptor."""
        ...


class PrivatePoolMemory:
    """Memory of this process alone."""

    agent_socket = ""
    shares_device_pools = False

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
        return allocate_pool(geometry, device)

    def allocate_for_rank(self, geometry: PoolGeometry) -> int:
        return create_memfd("mini-infer-kv", geometry.pool_bytes)

    def adopt_for_rank(self, geometry: PoolGeometry, device: torch.device, fd: int) -> None:
        raise AssertionError("ranks keep their pools to themselves")
