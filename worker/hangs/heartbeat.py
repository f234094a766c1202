"""Heartbeat: a counter in shared memory that the engine process increments and its front reads.

Raising it costs nothing, so it moves within a step, too: once a layer on a CPU, where steps may take long.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import BinaryIO

COUNTER_BYTES = 8


class Heartbeat:
    """One side of the memory behind `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        # An item of such a view is one 8-byte load or store: the other side never sees half of it.
        self._memory = memoryview(mmap.mmap(descriptor, COUNTER_BYTES)).cast("Q")
        self._count = 0

    @staticmethod
    def create_memory() -> BinaryIO:
        """Create the memory, to be mapped on both sides; the caller closes it."""
        memory = os.fdopen(os.memfd_create("mini-infer-heartbeat", os.MFD_CLOEXEC), "rb+")
        memory.truncate(COUNTER_BYTES)
        return memory

    def beat(self) -> None:
        self._count += 1
        self._memory[0] = self._count

    def read(self) -> int:
        return self._memory[0]


def beat_for(descriptor: int | None) -> Callable[[], None] | None:
    """What tells the front that passed `descriptor` of progress; None: no front watches."""
    if descriptor is None:
        return None
    heartbeat = Heartbeat(descriptor)
    os.close(descriptor)
    return heartbeat.beat
