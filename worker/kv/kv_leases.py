"""Leases that an engine process grants on its blocks, mostly on those of prompts.

A lease holds references on its blocks, in host or GPU memory; readers get the blocks' digests with it.
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
    """Grants and ends leases, and keeps their blocks while senders read them.

    Called from the engine's loop only, except `hold` and `let_go`, which threads that send blocks call.
    """

    def __init__(
        self,
        epoch: Epoch,
        ranks: Sequence[LocalPool],
        release: Callable[[Sequence[BlockId]], None],
        handles: HandleWriter,
    ) -> None:
        """release: called with the blocks of each lease that has ended."""
        self._table = LeaseTable(epoch)
        self._ranks = ranks
        self._release_blocks = release
        self._handles = handles
        self._lock = threading.Lock()  # guards `_held`, so that a lease cannot end while a sender takes it
        self._held: list[LeaseId] = []  # one entry per sender
        self._held_ended: list[Lease] = []  # ended leases whose blocks are still being sent

    def __len__(self) -> int:
        return len(self._table) + len(self._held_ended)

    def hold(self, lease_id: LeaseId, epoch: Epoch, positions: Sequence[int]) -> list[BlockId]:
        """Return a lease's blocks at `positions`, which stay allocated until `let_go`. Raises TransferError."""
        with self._lock:
            block_ids = self._table.resolve(lease_id, epoch, positions, time.monotonic())
            self._held.append(lease_id)
            return block_ids

    def let_go(self, lease_id: LeaseId) -> None:
        with self._lock:
            self._held.remove(lease_id)

    def digests(self, block_ids: Sequence[BlockId]) -> list[list[int]]:
        """Compute the digests of complete blocks in each rank's pool."""
        return [rank.digests(block_ids) for rank in self._ranks]

    def grant(
        self, block_ids: Sequence[BlockId], digests: Sequence[Sequence[int]], num_tokens: int, now: float
    ) -> tuple[Lease, pb.KvHandle]:
        """Lease blocks with the KV of `num_tokens`; the lease takes over the caller's references.

        Returns the lease and the handle for the reader.
        """
        lease = self._table.grant(block_ids, now, self._handles.lease_seconds)
        return lease, self._handles.write(lease, num_tokens, digests)

    def renew(self, lease_id: LeaseId, epoch: Epoch, now: float, lease_seconds: float) -> None:
        self._table.renew(lease_id, epoch, now, lease_seconds)

    def release(self, lease_id: LeaseId, epoch: Epoch) -> bool:
        """End a lease. Returns False if there is none, for example because it was released before."""
        lease = self._table.release(lease_id, epoch)
        if lease is not None:
            self._end(lease)
        return lease is not None

    def expire(self, now: float) -> list[LeaseId]:
        """End the leases whose deadline has passed; return their ids."""
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
        """Return the host rows with the lease's blocks from `first` on, here the blocks; None: no such lease."""
        lease = self._table.get(lease_id)
        return None if lease is None else list(lease.block_ids[first:])

    def give_up(self, lease: Lease) -> None:
        """Release the blocks of an ended lease, which no sender reads any more."""
        self._release_blocks(lease.block_ids)

    def _end(self, lease: Lease) -> None:
        """Give up a lease that was removed from the table, or keep its blocks while they are being sent."""
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
        """Lease the blocks that a step's prompt chunks have filled: here none before the whole prompt is computed."""
        return ()

    def lease_prompt(self, entry: OpenRequest, now: float) -> tuple[Lease, pb.KvHandle]:
        """Lease the blocks of a request that ended with PREFILLED: the KV of all its tokens except the last.

        A step in flight may be writing the last token's KV, possibly to one block more, which is not leased.
        """
        num_tokens = entry.request.num_known_tokens - 1
        block_ids = self._kv.detach(entry.request, num_tokens)
        return self._leases.grant(block_ids, self._digests(entry, block_ids), num_tokens, now)

    def _digests(self, entry: OpenRequest, block_ids: list[BlockId]) -> list[list[int]]:
        """Return the digests of a prompt's blocks, by rank."""
        return self._leases.digests(block_ids)
