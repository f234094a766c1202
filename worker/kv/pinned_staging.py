"""Pinned rows of shared host memory in front of a pool in GPU memory.

Peers that cannot map the GPU's memory read leases from them, and readers that only know host memory fill them: a pull
goes to rows first, then to the blocks, in pieces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from common.errors import TransferError
from kvstore.pool.block_pool import BlockPool
from kvstore.transports.host_pull import BlockPull, Blocks
from kvstore.transports.transport import Reader
from kvstore.types import BlockId
from worker.kv.device_pool import DevicePool

ROOM_POLL_SECONDS = 0.005
PIECE_BYTES = 64 << 20  # other pulls want rows, too


class HostRows:
    """Pinned rows of the shared memory in front of a GPU. Safe to use from several threads.

    blocks: uint8 [num_rows, block_bytes]; memory: the same bytes as a tensor.
    """

    def __init__(self, blocks: Blocks, memory: Tensor, beside: HostRows | None = None) -> None:
        """beside: rows of another rank, as many: a row is then free or taken in both."""
        self.blocks = blocks
        self.memory = memory
        self._rows: BlockPool = beside._rows if beside else BlockPool(len(blocks), enable_prefix_cache=False)
        self._lock: threading.Lock = beside._lock if beside else threading.Lock()

    def take(self, least: int, most: int) -> list[BlockId]:
        """Take up to `most` free rows; none when there are fewer than `least`."""
        with self._lock:
            count = min(self._rows.num_available, most)
            return self._rows.allocate(count) if count >= least else []

    def give_back(self, rows: Sequence[BlockId]) -> None:
        with self._lock:
            self._rows.release(rows)


class StagedReader:
    """`inner` pulls into the rows of `rows`."""

    def __init__(self, inner: Reader, rows: HostRows, device_pool: DevicePool) -> None:
        self._inner = inner
        self._rows = rows
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
                self._device_pool.copy_in(self._rows.memory, rows, pull.local_block_ids[first:stop])
            finally:
                self._rows.give_back(rows)
        return digests

    def close(self) -> None:
        self._inner.close()

    def _take(self, wanted: int, deadline: float) -> list[BlockId]:
        """Some rows, as soon as there are any. Raises TransferError."""
        while True:
            rows = self._rows.take(1, min(wanted, self._most))
            if rows:
                return rows
            if time.monotonic() > deadline:
                raise TransferError("no staging memory is free: raise --kv-staging-gb")
            time.sleep(ROOM_POLL_SECONDS)
