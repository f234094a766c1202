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
    _times: RequestTimes = field(default_factory=RequestTimes)

    def start_pull(self, num_tokens: int, now: float) -> None:
        self.started = now
        self._times.num_pulled_tokens = num_tokens

    def skip_pull(self, transport: str) -> None:
        """Nothing is left to pull. transport: of the prefetches."""
        self._times.transport = transport

    def finish_pull(self, pull: Pull, now: float) -> None:
        self._times.kv_pull_seconds = now - self.started
        self._times.transport = pull.transport
        self._times.kv_pull_failed = not pull.ok
        if not pull.ok:
            self._times.num_pulled_tokens = 0

    @property
    def num_leased_blocks(self) -> int:
        """Leading blocks of the prompt that have been leased while the rest is computed."""
        return len(self.part_digests[0]) if self.part_digests else 0

    def take_times(self, now: float) -> RequestTimes | None:
        """Return how the time to the first delta was spent; None after that."""
        if self.reported:
            return None
        self.reported, times = True, self._times
        times.queue_seconds = max(self.started - self.arrived, 0.0)
        times.prefill_seconds = max(now - self.started - times.kv_pull_seconds, 0.0)
        times.num_cached_tokens = self.request.num_cached_tokens
        times.num_prefetched_tokens = self.request.num_prefetched_tokens
        return times
