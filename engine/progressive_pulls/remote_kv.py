"""KV of peers where prompts are pulled while they are computed: prefetches beside the loads of requests."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.manager import KVManager
from engine.progressive_pulls.prefetches import Prefetches
from engine.request import Request, RequestStatus
from engine.scheduled_step import KvLoad
from engine.scheduling.remote_kv import RemoteKv
from engine.scheduling.request_queues import RequestQueues
from kvstore.types import BlockKey


class ProgressiveRemoteKv(RemoteKv):
    """Loads: for a request that has blocks and waits for them, or, as prefetches, for requests still to come."""

    def __init__(self, queues: RequestQueues, kv: KVManager) -> None:
        super().__init__(queues, kv)
        self._prefetches = Prefetches(kv.pool, kv.block_size)

    def prefetch(self, source: object, block_keys: Sequence[BlockKey]) -> None:
        """Queue full blocks of a prompt for the next step, which says what to pull of them."""
        self._prefetches.add(source, block_keys)

    def start_load(self, request: Request, num_cached: int) -> int | None:
        """See RemoteKv."""
        request.num_prefetched_tokens = self._prefetches.take_fetched(request.block_keys) * self._kv.block_size
        return super().start_load(request, num_cached)

    def finish(self, load: KvLoad, ok: bool) -> None:
        """See RemoteKv."""
        if load.owner is not None:
            super().finish(load, ok)
            return
        self._prefetches.finish(load, ok)
        self._stop_awaiting()

    def awaits_prefetch(self, request: Request) -> bool:
        """See RemoteKv."""
        if request.kv_source is None:
            return False
        self._kv.prefixes.extend_keys(request)
        return self._prefetches.has_any_of(request.block_keys)

    def reserve_prefetches(self) -> None:
        """See RemoteKv."""
        if self._prefetches.has_queued:
            self._loads += self._prefetches.reserve(self._num_spare_blocks())
            self._stop_awaiting()

    def _stop_awaiting(self) -> None:
        """Let requests go on whose prefetches have all ended, well or not."""
        for request in list(self._queues.awaiting):
            if not self.awaits_prefetch(request):
                self._queues.move(request, RequestStatus.WAITING)

    def _num_spare_blocks(self) -> int:
        """Blocks that nobody in this engine needs: beyond all known tokens of running requests, and the next ones."""
        if self._queues.waiting or self._queues.swapped:
            return 0
        kv, running = self._kv, self._queues.running
        missing = (kv.num_blocks_for(r.num_tokens) - len(r.block_ids) for r in running)
        return kv.pool.num_available - sum(max(count, 0) + kv.blocks_per_position for count in missing)
