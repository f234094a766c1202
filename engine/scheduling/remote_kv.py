"""KV of prompts that peers have computed: requests that wait for it, and what is to be pulled into which blocks.

Reserves blocks between the scheduler's decisions and lists the loads to be made. Does not know how KV travels: a
worker takes the loads and reports how they ended.
"""

from __future__ import annotations

from engine.kv.manager import KVManager
from engine.request import Request, RequestStatus
from engine.scheduled_step import KvLoad
from engine.scheduling.request_queues import RequestQueues


class RemoteKv:
    """Loads for requests that have blocks and wait for them. Nothing is pulled ahead of its request."""

    def __init__(self, queues: RequestQueues, kv: KVManager) -> None:
        self._queues = queues
        self._kv = kv
        self._loads: list[KvLoad] = []
        self._cancelled: set[Request] = set()

    def start_load(self, request: Request, num_cached: int) -> int | None:
        """Reserve blocks for what `request.kv_source` has, and `request` waits until they are filled.

        num_cached: leading tokens whose KV is here. Returns the number of tokens that need not be loaded; None when
        the source is not worth a load, because that would not save a whole block of computing.
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
        """Loads that blocks have been reserved for since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def cancel_load(self, request: Request) -> None:
        """Let a loading request end with its load: its blocks are being written."""
        self._cancelled.add(request)

    def is_cancelled(self, request: Request) -> bool:
        return request in self._cancelled

    def finish(self, load: KvLoad, ok: bool) -> None:
        """A load has ended. After a failure its owner computes what the load should have brought."""
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
            self._kv.release_uncomputed(request)  # blocks that others can read are among them
        self._queues.move(request, RequestStatus.RUNNING)

    def reserve_prefetches(self) -> None:
        """Give prefetches what blocks nobody needs."""

    def awaits_prefetch(self, request: Request) -> bool:
        """Whether a peer's KV for `request` is on its way already, so that a load would copy it twice."""
        return False
