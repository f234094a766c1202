"""Copies between a runner's pool and its host slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from kvstore.types import BlockId, HostSlot


class Copies(Protocol):
    """Between one pool and one buffer of host slots."""

    def warm_up(self) -> None:
        """Do what the first copies would wait for."""

    def out(self, copies: Sequence[tuple[BlockId, HostSlot]]) -> Callable[[], None]:
        """Copy blocks as they are now to slots. The returned function waits until the slots are written."""
        ...

    def into(self, copies: Sequence[tuple[HostSlot, BlockId]]) -> Callable[[], None]:
        """Copy slots to blocks, before what is computed next; they see all copies `out` that came before.

        The returned function waits until the slots have been read.
        """
        ...


def open_copies(pool: Tensor, host_buffer: Tensor, beside_steps: bool) -> Copies:
    """beside_steps: on another stream than the steps. Raises ConfigError when a driver does not pin the slots."""
    if beside_steps:
        from engine.host_tier.gpu_copies import HostCopies

        return HostCopies(pool, host_buffer)
    from engine.host_tier.cpu_copies import CpuCopies

    return CpuCopies(pool, host_buffer)
