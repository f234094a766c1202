"""Pulls of host transports into a pool in GPU memory: to pinned rows first, then to the blocks, in pieces."""

from __future__ import annotations

import time
from dataclasses import replace

from common.errors import TransferError
from kvstore.handle.handle import PeerShard
from kvstore.transports.client import Transport
from kvstore.transports.host_pull import BlockPull
from kvstore.types import BlockId
from worker.kv.device_pool import DevicePool
from worker.kv.kv_exporter import HostRows

ROOM_POLL_SECONDS = 0.005
PIECE_BYTES = 64 << 20  # other pulls want rows, too


class StagedTransport:
    """`inner` pulls into the rows of `rows`."""

    def __init__(self, inner: Transport, rows: HostRows, device_pool: DevicePool) -> None:
        self.name = inner.name
        self._inner = inner
        self._rows = rows
        self._device_pool = device_pool
        self._most = max(PIECE_BYTES // device_pool.block_bytes, 1)

    def offered_by(self, shard: PeerShard) -> bool:
        return self._inner.offered_by(shard)

    def open(self, shard: PeerShard) -> None:
        self._inner.open(shard)

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
