"""What a worker has been given and has not reported as done, as the router counts it: prompts and rows. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.step_times import num_pairs

if TYPE_CHECKING:
    from router.workers.leg import Leg


@dataclass(slots=True)
class Backlog:
    """Counts of one worker; a pair is a prompt token with one token before it (`common/step_times.py`)."""

    num_rows: int = 0  # legs that decode here
    context_tokens: int = 0  # of their prompts
    num_expected: int = 0  # choices that will come here when their leg elsewhere ends
    expected_tokens: int = 0  # of their prompts
    _tokens: int = 0  # to compute, of legs without a first token
    _pairs: float = 0.0
    _done_tokens: int = 0  # of these, by the worker's reports
    _done_pairs: float = 0.0
    _late: list[Leg] = field(default_factory=list)  # in the order in which they stop to let others go first

    @property
    def prompt_tokens(self) -> int:
        return max(self._tokens - self._done_tokens, 0)

    @property
    def prompt_pairs(self) -> float:
        return max(self._pairs - self._done_pairs, 0.0)

    def deferred(self, now: float) -> tuple[int, float]:
        """Prompt tokens, and their pairs, that wait behind a new request which is in time.

        A late prompt is begun when no others are left; then it waits behind nobody, and does not count.
        """
        waiting = [leg for leg in self._late if leg.late_until > now]
        num_tokens = sum(leg.pending_tokens for leg in waiting)
        num_begun = num_tokens - self.prompt_tokens
        if num_begun >= 0 and waiting:
            num_tokens -= waiting.pop(0).pending_tokens
        return num_tokens, sum(map(_pairs, waiting))

    def add(self, leg: Leg) -> None:
        if leg.decodes:
            self.num_rows += 1
            self.context_tokens += leg.num_prompt_tokens
        if leg.late_until and leg.pending_tokens:
            self._late.append(leg)
        self._tokens += leg.pending_tokens
        self._pairs += _pairs(leg)

    def expect(self, leg: Leg) -> None:
        """Count a leg elsewhere whose choice goes on here."""
        self.num_expected += 1
        self.expected_tokens += leg.num_prompt_tokens

    def computed(self, num_tokens: int, pairs: float) -> None:
        """Count what a step has computed of prompts."""
        if self._tokens:
            self._done_tokens += num_tokens
            self._done_pairs += pairs

    def settle(self, leg: Leg) -> None:
        """Forget the leg's prompt: it is computed, or nobody wants it any more."""
        if not leg.pending_tokens:
            return
        pairs = _pairs(leg)
        self._tokens -= leg.pending_tokens
        self._pairs -= pairs
        self._done_tokens = max(self._done_tokens - leg.pending_tokens, 0) if self._tokens else 0
        self._done_pairs = max(self._done_pairs - pairs, 0.0) if self._tokens else 0.0
        leg.pending_tokens = 0
        if leg.late_until:
            self._late.remove(leg)

    def remove(self, leg: Leg) -> None:
        if leg.decodes:
            self.num_rows -= 1
            self.context_tokens -= leg.num_prompt_tokens
        self.settle(leg)

    def unexpect(self, leg: Leg) -> None:
        self.num_expected -= 1
        self.expected_tokens -= leg.num_prompt_tokens


def _pairs(leg: Leg) -> float:
    return num_pairs(leg.num_prompt_tokens - leg.pending_tokens, leg.pending_tokens)
