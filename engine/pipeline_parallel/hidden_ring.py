"""Hidden states between the processes of two stages on one host, through a ring in shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.tensor_parallel.plan_ring import RingReader, RingWriter, ring_bytes


@dataclass(frozen=True, slots=True)
class RingFds:
    """Descriptors of the ring between two stages, which both processes inherit."""

    memory: int
    wake: int

    @classmethod
    def create(cls) -> RingFds:
        memory = os.memfd_create("mini-infer-hidden")
        os.ftruncate(memory, ring_bytes(1))
        return cls(memory, os.eventfd(0))


class RingSource:
    """See HiddenSource. A frame is a step, in the order in which both stages run them."""

    def __init__(self, fds: RingFds, check: Callable[[], None] | None = None) -> None:
        """check: see RingReader."""
        self._ring = RingReader(fds.memory, fds.wake, 0, 1, check=check)

    def receive(self, hidden: Tensor) -> None:
        hidden.copy_(torch.frombuffer(bytearray(self._ring.read()), dtype=hidden.dtype).view(hidden.shape))


class RingSink:
    """See HiddenSink."""

    def __init__(self, fds: RingFds) -> None:
        self._ring = RingWriter(fds.memory, [fds.wake], lambda: None)  # this process ends with rank 0's

    def send(self, hidden: Tensor) -> None:
        self._ring.write(hidden.contiguous().numpy().tobytes())
