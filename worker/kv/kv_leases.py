"""Leases that an engine process grants on its blocks, those of prompts first of all.

A lease holds the references on its blocks, wherever they lie; readers get the blocks' digests with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from engine.kv.manager import KVManager
from engine.request import RequestId
from engine.scheduled_step import PromptChunk
from kvstore.handle.handle import HandleWriter
from kvstore.pool.leases import Lease, LeaseTable
from kvstore.transports.transport import LocalPool
from kvstore.types import BlockId, Epoch, LeaseId
from protos import types_pb2 as pb
from worker.engine_process.figures import OpenRequest

logger = logging.getLogger("engine")


class KvLeases:
    """The table of leases, and what happens to blocks when one is granted, read or ended.

    Called from the engine's loop only, except `hold` and `let_go`, which threads that send blocks share.
    """

    def __init__(
        self,
        epoch: Epoch,
        ranks: Sequence[LocalPool],
        release: Callable[[Sequence[BlockId]], None],
        handles: HandleWriter,
    ) -> None:
        """release: takes the blocks of leases that have ended."""
        self._table = LeaseTable(epoch)
        self._ranks = ranks
        self._release_blocks = release
        self._handles = handles
        self._lock = threading.Lock()  # held while it is decided whether a lease's blocks are kept for a sender
        self._held: list[LeaseId] = []  # once for each sender
        self._held_ended: list[Lease] = []  # their blocks are still being sent

    def __len__(self) -> int:
        return len(self._table) + len(self._held_ended)

    def hold(self, lease_id: LeaseId, epoch: Epoch, positions: Sequence[int]) -> list[BlockId]:
        """Blocks of a lease at `positions`, which stay its own until `let_go`. Raises TransferError."""
        with self._lock:
            block_ids = self._table.resolve(lease_id, epoch, positions, time.monotonic())
            self._held.append(lease_id)
            return block_ids

    def let_go(self, lease_id: LeaseId) -> None:
        with self._lock:
            self._held.remove(lease_id)

    def digests(self, block_ids: Sequence[BlockId]) -> list[list[int]]:
        """Digests of complete blocks, for each rank's pool."""
        return [rank.digests(block_ids) for rank in self._ranks]

    def grant(
        self, block_ids: Sequence[BlockId], digests: Sequence[Sequence[int]], num_tokens: int, now: float
    ) -> tuple[Lease, pb.KvHandle]:
        """Lease blocks that hold the KV of `num_tokens`; their references are the lease's from now on.

        Also returns the handle for the reader.
        """
        lease = self._table.grant(block_ids, now, self._handles.lease_seconds)
        return lease, self._handles.write(lease, num_tokens, digests)

    def renew(self, lease_id: LeaseId, epoch: Epoch, now: float, lease_seconds: float) -> None:
        self._table.renew(lease_id, epoch, now, lease_seconds)

    def release(self, lease_id: LeaseId, epoch: Epoch) -> bool:
        """End a lease. False: there is none, for example because it was released before."""
        lease = self._table.release(lease_id, epoch)
        if lease is not None:
            self._end(lease)
        return lease is not None

    def expire(self, now: float) -> list[LeaseId]:
        """End the leases whose deadline has come."""
        ended, self._held_ended = self._held_ended, []
        for lease in ended:
            self._end(lease)
        expired = self._table.expire(now)
        for lease in expired:
            logger.warning(
                "lease %s expired: nobody read the KV of %d blocks", lease.lease_id[:8], len(lease.block_ids)
            )
            self._end(lease)
        return [lease.lease_id for lease in expired]

    def stage(self, lease_id: LeaseId, first: int) -> list[BlockId] | None:
        """Rows of the shared memory with the lease's blocks from `first` on, here the blocks; None: no such lease."""
        lease = self._table.get(lease_id)
        return None if lease is None else list(lease.block_ids[first:])

    def give_up(self, lease: Lease) -> None:
        """Give up the blocks of a lease that has ended and that nobody sends."""
        self._release_blocks(lease.block_ids)

    def _end(self, lease: Lease) -> None:
        """Give up a lease that the table has no more, or keep its blocks until nobody sends them."""
        with self._lock:
            is_held = lease.lease_id in self._held
        if is_held:
            self._held_ended.append(lease)
        else:
            self.give_up(lease)


class PromptLeases:
    """Leases on prompts that this worker computes for peers. Called from the engine process's loop only."""

    def __init__(self, kv: KVManager, leases: KvLeases) -> None:
        """kv: the engine's."""
        self._kv = kv
        self._leases = leases

    def lease_parts(
        self, chunks: Iterable[PromptChunk], requests: Mapping[RequestId, OpenRequest], now: float
    ) -> Iterable[tuple[Lease, pb.KvOffer]]:
        """Lease what a step's chunks have added to prompts: nothing, before all of a prompt is computed."""
        return ()

    def lease_prompt(self, entry: OpenRequest, now: float) -> tuple[Lease, pb.KvHandle]:
        """Lease the blocks of a request that ended with PREFILLED: the KV of all its tokens but the last.

        A step in flight may be computing that one into one block more.
        """
        num_tokens = entry.request.num_known_tokens - 1
        block_ids = self._kv.detach(entry.request, num_tokens)
        return self._leases.grant(block_ids, self._digests(entry, block_ids), num_tokens, now)

    def _digests(self, entry: OpenRequest, block_ids: list[BlockId]) -> list[list[int]]:
        """Digests of the blocks of a prompt, by rank."""
        return self._leases.digests(block_ids)
