"""KV of prompts that peers have computed: the requests that wait for it, and the loads that pull it.

Reserves blocks for the scheduler and lists the loads to be made. Does not know how KV is transferred: a worker takes
the loads and reports their ends.
"""

from __future__ import annotations

from engine.kv.manager import KVManager
from engine.request import Request, RequestStatus
from engine.scheduled_step import KvLoad
from engine.scheduling.request_queues import RequestQueues


class RemoteKv:
    """Loads for requests that own the blocks and wait for them. Nothing is prefetched."""

    def __init__(self, queues: RequestQueues, kv: KVManager) -> None:
        self._queues = queues
        self._kv = kv
        self._loads: list[KvLoad] = []
        self._cancelled: set[Request] = set()

    def start_load(self, request: Request, num_cached: int) -> int | None:
        """Reserve blocks for the KV of `request.kv_source`, and let `request` wait until they are filled.

        num_cached: number of leading tokens cached here. Returns the number of tokens that need not be loaded, or
        None if a load would save less than a block of computation and is not started.
        """
        source, request.kv_source = request.kv_source, None  # one attempt: a preempted request recomputes
        if request.num_source_tokens - num_cached < self._kv.block_size:
            self._loads.append(KvLoad(request, source, [], [], 0))
            return None
        fresh, num_kept = self._kv.attach_for_load(request, request.num_source_tokens)
        request.num_computed_tokens = num_cached
        self._queues.move(request, RequestStatus.LOADING)
        num_tokens = request.num_source_tokens - num_kept
        self._loads.append(KvLoad(request, source, list(fresh), list(fresh.values()), num_tokens))
        return num_kept

    def take_loads(self) -> list[KvLoad]:
        """Return the loads that blocks have been reserved for since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def cancel_load(self, request: Request) -> None:
        """Let a loading request end when its load does, because its blocks are being written."""
        self._cancelled.add(request)

    def is_cancelled(self, request: Request) -> bool:
        return request in self._cancelled

    def finish(self, load: KvLoad, ok: bool) -> None:
        """Report that a load has ended. After a failure its request computes the tokens itself."""
        request = load.owner
        assert request is not None, "there are no prefetches"
        if request in self._cancelled:
            self._cancelled.remove(request)
            self._queues.remove(request)
            self._kv.release(request)
            return
        if ok:
            request.num_computed_tokens = request.num_source_tokens
            self._kv.publish(request)
        else:
            self._kv.release_uncomputed(request)  # keeps its cached blocks, which other requests share
        self._queues.move(request, RequestStatus.RUNNING)

    def reserve_prefetches(self) -> None:
        """Reserve spare blocks for prefetches."""

    def awaits_prefetch(self, request: Request) -> bool:
        """Whether KV for `request` is already being prefetched, so that a load would copy it twice."""
        return False
