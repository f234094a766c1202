"""Latency objectives: by how much a prediction misses them, and when a request's next token is due. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from common.objectives.chunks import FLAT_CHUNK_TOKENS
from router.routing.views import Candidate

TTFT_MARGIN = 0.25  # share of the objective that predictions may use, since they do not know later arrivals
MOST_GAP = 0.3  # largest violation by the gap: one long gap of a short answer does not justify any wait
ROUNDING = 1e-6
SLOWDOWN = 5.0  # a first token is due after this many times its prompt's time alone: short prompts overtake long ones
LATEST = 0.5  # share of the objective after which a first token is due at the latest
MIN_DUE_SECONDS = 1e-3
AHEAD = -60.0  # due before all requests that have waited for less than a minute


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives in seconds; 0: none."""

    ttft: float = 0.0
    itl: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.ttft or self.itl)

    def violation(self, ttft: float, itl: float) -> float:
        """By how much predictions miss the objectives, as a share of them; 0: both are met."""
        late = max(ttft / (TTFT_MARGIN * self.ttft) - 1.0, 0.0) if self.ttft else 0.0
        return late + (min(max(itl / self.itl - 1.0 - ROUNDING, 0.0), MOST_GAP) if self.itl else 0.0)

    def due_seconds(self, chosen: Candidate, num_new_tokens: int, waited_seconds: float, has_started: bool) -> float:
        """Return the seconds until a request's next token is due on the chosen workers; 0: no objective.

        A first token is due after a time proportional to its prompt's, or before it would be late. Prompts so short
        that they hardly lengthen a step go first, and running streams before those: both have negative values.
        """
        if not self:
            return 0.0
        if has_started:
            return 2 * AHEAD
        if num_new_tokens <= FLAT_CHUNK_TOKENS:
            return AHEAD
        left = LATEST * (self.ttft or inf) - waited_seconds
        return max(min(SLOWDOWN * chosen.terms["compute"], left), MIN_DUE_SECONDS)
