"""Latency objectives: by how much a prediction misses them, and when a request's next token is due. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from common.objectives.chunks import FLAT_CHUNK_TOKENS
from router.routing.views import Candidate

TTFT_MARGIN = 0.25  # share of the objective that predictions may use: they miss what arrives later
MOST_GAP = 0.3  # violation by a gap, at most: one long gap of a short answer is no reason to wait however long
ROUNDING = 1e-6
SLOWDOWN = 5.0  # times what its prompt takes alone, in which a first token is due: short prompts pass long ones
LATEST = 0.5  # share of the objective in which it is due at the latest
MIN_DUE_SECONDS = 1e-3
AHEAD = -60.0  # due before all that have waited for less than a minute


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds; 0: none."""

    ttft: float = 0.0
    itl: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.ttft or self.itl)

    def violation(self, ttft: float, itl: float) -> float:
        """By how much predictions miss the objectives, as a share of them; 0: both are kept."""
        late = max(ttft / (TTFT_MARGIN * self.ttft) - 1.0, 0.0) if self.ttft else 0.0
        return late + (min(max(itl / self.itl - 1.0 - ROUNDING, 0.0), MOST_GAP) if self.itl else 0.0)

    def due_seconds(self, chosen: Candidate, num_new_tokens: int, waited_seconds: float, has_started: bool) -> float:
        """Seconds until the next token of a request is due on the workers chosen for it; 0: no objective.

        A first token is due in proportion to its prompt, or before it would be late. Prompts so short that steps
        hardly take longer with them go ahead of these, and streams ahead of both: below 0.
        """
        if not self:
            return 0.0
        if has_started:
            return 2 * AHEAD
        if num_new_tokens <= FLAT_CHUNK_TOKENS:
            return AHEAD
        left = LATEST * (self.ttft or inf) - waited_seconds
        return max(min(SLOWDOWN * chosen.terms["compute"], left), MIN_DUE_SECONDS)
