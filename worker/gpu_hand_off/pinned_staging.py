"""Pinned rows of shared host memory that stage copies from and to a pool in GPU memory.

Peers that cannot map the GPU's memory read leases from them. Readers that only handle host memory pull into rows,
from where blocks are copied to the pool, piece by piece.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from common.errors import TransferError
from kvstore.pool.block_pool import BlockPool
from kvstore.transports.transport import BlockPull, Reader
from kvstore.types import BlockId
from worker.gpu_hand_off.device_pool import DevicePool

ROOM_POLL_SECONDS = 0.005
PIECE_BYTES = 64 << 20  # other pulls need rows, too


class HostRows:
    """Which staging rows of a worker's GPUs are free, for all ranks at once. Safe to use from several threads."""

    def __init__(self, num_rows: int) -> None:
        self._rows = BlockPool(num_rows, enable_prefix_cache=False)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._rows.num_blocks

    def take(self, least: int, most: int) -> list[BlockId]:
        """Take up to `most` free rows; none if fewer than `least` are free."""
        with self._lock:
            count = min(self._rows.num_available, most)
            return self._rows.allocate(count) if count >= least else []

    def give_back(self, rows: Sequence[BlockId]) -> None:
        with self._lock:
            self._rows.release(rows)


class StagedReader:
    """Pulls with `inner` into free rows of `memory`, and copies them to the pool."""

    def __init__(self, inner: Reader, rows: HostRows, memory: Tensor, device_pool: DevicePool) -> None:
        self._inner = inner
        self._rows = rows
        self._memory = memory
        self._device_pool = device_pool
        self._most = max(PIECE_BYTES // device_pool.block_bytes, 1)

    def pull(self, pull: BlockPull) -> list[list[int]]:
        digests: list[list[int]] = [[] for _ in pull.parts]
        while (first := len(digests[0])) < len(pull.positions):
            rows = self._take(len(pull.positions) - first, pull.deadline)
            try:
                stop = first + len(rows)
                piece = replace(pull, positions=pull.positions[first:stop], local_block_ids=rows)
                found = self._inner.pull(piece)
                digests = [known + new for known, new in zip(digests, found, strict=True)]
                self._device_pool.copy_in(self._memory, rows, pull.local_block_ids[first:stop])
            finally:
                self._rows.give_back(rows)
        return digests

    def close(self) -> None:
        self._inner.close()

    def _take(self, wanted: int, deadline: float) -> list[BlockId]:
        """Take some rows as soon as any are free. Raises TransferError at the deadline."""
        while True:
            rows = self._rows.take(1, min(wanted, self._most))
            if rows:
                return rows
            if time.monotonic() > deadline:
                raise TransferError("no staging memory is free: raise --kv-staging-gb")
            time.sleep(ROOM_POLL_SECONDS)
