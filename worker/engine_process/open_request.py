"""Bookkeeping of the engine process for an open request, beside the engine's: times, deadline and KV pull."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request
from worker.messages import Pull, RequestTimes


@dataclass(slots=True)
class OpenRequest:
    """All times are monotonic."""

    request: Request
    arrived: float
    deadline: float  # inf: none
    started: float = 0.0  # its first step or its pull; 0: it still waits
    reported: bool = False
    part_digests: list[list[int]] = field(default_factory=list)  # of each rank, of blocks leased while it computes
    times: RequestTimes = field(default_factory=RequestTimes)

    def start_pull(self, num_tokens: int, now: float) -> None:
        self.started = now
        self.times.num_pulled_tokens = num_tokens

    def finish_pull(self, pull: Pull, now: float) -> None:
        self.times.kv_pull_seconds = now - self.started
        self.times.transport = pull.transport
        self.times.kv_pull_failed = not pull.ok
        if not pull.ok:
            self.times.num_pulled_tokens = 0

    def take_times(self, now: float) -> RequestTimes | None:
        """Return how the time to the first delta was spent; None after that."""
        if self.reported:
            return None
        self.reported, times = True, self.times
        times.queue_seconds = max(self.started - self.arrived, 0.0)
        times.prefill_seconds = max(now - self.started - times.kv_pull_seconds, 0.0)
        times.num_cached_tokens = self.request.num_cached_tokens
        times.num_prefetched_tokens = self.request.num_prefetched_tokens
        return times
