"""A heartbeat counter in shared memory, incremented by the engine process and read by its front.

Incrementing costs nothing, so it also happens within a step: once per layer on a CPU, where steps may take long.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import BinaryIO

COUNTER_BYTES = 8


class Heartbeat:
    """One side of the shared memory that `descriptor` refers to."""

    def __init__(self, descriptor: int) -> None:
        # Access to an item of this view is one 8-byte load or store, so the other side never sees half of it.
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
    """Return a function that tells the front which passed `descriptor` of progress; None: no front watches."""
    if descriptor is None:
        return None
    heartbeat = Heartbeat(descriptor)
    os.close(descriptor)
    return heartbeat.beat
