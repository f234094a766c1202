"""KV of prompts that peers have computed: requests that wait for it, and what is to be pulled into which blocks.

Reserves blocks between the scheduler's decisions and lists the loads to be made. Does not know how KV travels: a
worker takes the jobs and reports how they ended.
"""

from __future__ import annotations

from engine.kv.manager import KVManager
from engine.request import LoadJob, Request, RequestId, RequestStatus
from engine.scheduling.prefetches import Prefetches, PrefetchJob
from engine.scheduling.request_queues import RequestQueues


class RemoteKv:
    """Loads, each for a request that has blocks and waits for them, and prefetches, for requests still to come."""

    def __init__(self, queues: RequestQueues, kv: KVManager) -> None:
        self.prefetches = Prefetches(kv.pool)
        self._queues = queues
        self._kv = kv
        self._jobs: list[LoadJob] = []
        self._cancelled: set[Request] = set()

    # -- loads -----------------------------------------------------------------------------------------------

    def start_load(self, request: Request, num_cached: int) -> int | None:
        """Reserve blocks for what `request.kv_source` has, and `request` waits until they are filled.

        num_cached: leading tokens whose KV is here. Returns the number of tokens that need not be loaded; None when
        the source is not worth a load, because that would not save a whole block of computing.
        """
        source, request.kv_source = request.kv_source, None  # one attempt: a preempted request recomputes
        request.num_prefetched_tokens = self.prefetches.take_fetched(request.block_keys) * self._kv.block_size
        if request.num_source_tokens - num_cached < self._kv.block_size:
            self._jobs.append(LoadJob(request, source, [], [], 0))
            return None
        fresh, num_kept = self._kv.attach_for_load(request, request.num_source_tokens)
        request.num_computed_tokens = num_cached
        self._queues.move(request, RequestStatus.LOADING)
        num_tokens = request.num_source_tokens - num_kept
        self._jobs.append(LoadJob(request, source, list(fresh), list(fresh.values()), num_tokens))
        return num_kept

    def take_load_jobs(self) -> list[LoadJob]:
        """Loads that blocks have been reserved for since the last call."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def cancel_load(self, request: Request) -> None:
        """Let a loading request end with its load: its blocks are being written."""
        self._cancelled.add(request)

    def is_cancelled(self, request: Request) -> bool:
        return request in self._cancelled

    def finish_load(self, request_id: RequestId, ok: bool) -> Request | None:
        """A load has ended; None when its request was cancelled meanwhile.

        After a failure the request computes what the load should have brought.
        """
        request = self._queues.by_id[request_id]
        if request in self._cancelled:
            self._cancelled.remove(request)
            self._queues.remove(request)
            self._kv.release(request)
            return None
        if ok:
            request.num_computed_tokens = request.num_source_tokens
            self._kv.publish(request)
        else:
            self._kv.release_uncomputed(request)  # blocks that others can read are among them
        self._queues.move(request, RequestStatus.RUNNING)
        return request

    # -- prefetches ------------------------------------------------------------------------------------------

    def awaits_prefetch(self, request: Request) -> bool:
        """Whether a peer's KV for `request` is on its way already, so that a load would copy it twice."""
        if request.kv_source is None:
            return False
        self._kv.prefixes.extend_keys(request)
        return self.prefetches.has_any_of(request.block_keys)

    def reserve_prefetches(self) -> None:
        """Give queued prefetches what blocks nobody needs."""
        if self.prefetches.has_queued:
            self.prefetches.reserve(self._num_spare_blocks())
            self._stop_awaiting()

    def finish_prefetch(self, job: PrefetchJob, ok: bool) -> None:
        """A prefetch has ended: the prefix cache has its blocks, or after a failure nobody."""
        self.prefetches.finish(job, ok)
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
