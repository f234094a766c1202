"""All requests of one engine, in one queue for each status, each in the order of service.

Only moves requests: the scheduler and its parts decide which one to move, and manage its blocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from common.pairs import num_pairs
from engine.request import Request, RequestId, RequestStatus, SchedulerLoad

_rank = attrgetter("rank")


class RequestQueues:
    """Queues by status, read by others; only `enter`, `move` and `remove` change them."""

    def __init__(self) -> None:
        self.by_id: dict[RequestId, Request] = {}
        self.waiting: list[Request] = []
        self.awaiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self._by_status = {
            RequestStatus.WAITING: self.waiting,
            RequestStatus.AWAITING: self.awaiting,
            RequestStatus.LOADING: self.loading,
            RequestStatus.RUNNING: self.running,
            RequestStatus.SWAPPED: self.swapped,
        }
        self._forgotten: list[RequestId] = []

    @property
    def num_active(self) -> int:
        """Number of requests that count towards `max_num_seqs`."""
        return len(self.running) + len(self.loading)

    def enter(self, request: Request, status: RequestStatus) -> None:
        """Add a new request, which has its rank."""
        self.by_id[request.request_id] = request
        request.status = status
        insort(self._by_status[status], request, key=_rank)

    def move(self, request: Request, status: RequestStatus) -> None:
        """Move a request to the queue of another status."""
        self._by_status[request.status].remove(request)
        request.status = status
        insort(self._by_status[status], request, key=_rank)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended."""
        self._by_status[request.status].remove(request)
        del self.by_id[request.request_id]
        request.status = RequestStatus.FINISHED
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Let the runner drop its state of `request` with the next step."""
        if request.num_planned_blocks >= 0:
            self._forgotten.append(request.request_id)
            request.num_planned_blocks = -1

    def take_forgotten(self) -> list[RequestId]:
        """Return the requests whose state the runner drops with the next step."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def rank_anew(self, rank: Callable[[Request], tuple[float, ...]]) -> None:
        """Give all requests new ranks. Called between steps."""
        for request in self.by_id.values():
            request.rank = rank(request)
        for queue in self._by_status.values():
            queue.sort(key=_rank)

    def load(self, num_preemptions: int) -> SchedulerLoad:
        """Compute the load. num_preemptions: since the start."""
        prefill_tokens, prefill_pairs, context_tokens = 0, 0.0, 0
        for request in self.running:  # runs after every step: properties would double its time
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            num_left = num_tokens + request.num_pending_tokens - request.num_computed_tokens
            if num_left > 1:
                prefill_tokens += num_left
                prefill_pairs += num_pairs(request.num_computed_tokens, num_left)
            else:
                context_tokens += num_tokens
        for request in self.waiting:
            if request.kv_source is None:
                prefill_tokens += request.num_tokens
                prefill_pairs += num_pairs(0, request.num_tokens)
        return SchedulerLoad(
            num_preemptions,
            num_requests=len(self.by_id),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_swapped=len(self.swapped),
            num_loading=len(self.loading) + len(self.awaiting),
            waiting_prefill_tokens=prefill_tokens,
            waiting_prefill_pairs=round(prefill_pairs),
            context_tokens=context_tokens,
        )
