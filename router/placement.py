"""Which workers serve a request: a placement, and the decision for it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.types import WorkerId


@dataclass(frozen=True, slots=True)
class Placement:
    """One way to serve a request. `prefill` None: the decode worker computes the prompt."""

    decode: WorkerId
    prefill: WorkerId | None
    cached_tokens: int  # of the prompt, where it is computed

    @property
    def kind(self) -> str:
        """The placement, for metrics and /explain."""
        return "disaggregated" if self.prefill is not None else "local"


@dataclass(frozen=True, slots=True)
class Decision:
    """The placement that was chosen. `router/routing` adds those that were considered."""

    chosen: Placement
