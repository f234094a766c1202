"""KV export: leased blocks that peers may read.

A lease holds the references on its blocks, wherever they lie; readers get the blocks' digests with it. Blocks in GPU
memory are copied to rows of shared host memory only when a reader asks for it, which one of the same host's GPUs does
not. Called by `KvLeases` and `KvLoads`, from the engine's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.pool.leases import Lease
from kvstore.types import BlockId, LeaseId
from worker.kv.rank_pool import RankPool


class KvExporter:
    """The owner's side of leases."""

    def __init__(
        self, ranks: Sequence[RankPool], release: Callable[[Sequence[BlockId]], None],
        end_steps: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """ranks: of this worker, all in GPU memory or none. release: takes the blocks of leases that have ended.

        end_steps: on a CPU, returns when no step in flight writes to blocks any more.
        """
        self._ranks = ranks
        self._rows = ranks[0].rows
        self._release = release
        self._end_steps = end_steps
        self._staged: dict[LeaseId, dict[int, list[BlockId]]] = {}  # by the first position

    def digests(self, block_ids: Sequence[BlockId]) -> list[list[int]]:
        """Digests of complete blocks, for each rank's pool."""
        return [rank.digests(block_ids) for rank in self._ranks]

    def stage(self, lease: Lease, first: int) -> list[BlockId] | None:
        """Rows of the shared memory that hold the lease's blocks from position `first` on; None without room."""
        block_ids = lease.block_ids[first:]
        if self._rows is None:
            return list(block_ids)
        staged = self._staged.setdefault(lease.lease_id, {})
        if first not in staged:
            rows = self._rows.take(len(block_ids), len(block_ids))
            if not rows:
                return None
            for rank in self._ranks:
                rank.copy_out(block_ids, rows)
            staged[first] = rows
        return staged[first]

    def end_export(self, lease: Lease) -> None:
        """Give up the references and rows of a lease that has ended."""
        self._release(lease.block_ids)
        for rows in self._staged.pop(lease.lease_id, {}).values():
            assert self._rows is not None
            self._rows.give_back(rows)

    def fence(self) -> None:
        """Mark that blocks are about to be given to loads, behind the steps launched so far.

        On a CPU steps in flight end now; but for those of a pipeline they have when the loop gives blocks away.
        """
        if self._rows is None:
            self._end_steps()
        for rank in self._ranks:
            rank.fence(self._ranks[0])
