"""What proposes drafts, and the choice by the settings. Another kind is a `Proposer` in a file next to `ngram.py`.

A proposer cannot change a request's output, only its speed: a draft is accepted when it equals the token that is
sampled at its position, which is the one that the request would get without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from engine.config import EngineConfig
from engine.plan import StepResult
from engine.request import TokenId
from engine.runner import Proposer, Sampled
from engine.speculation.drafts import Speculation
from engine.speculation.ngram import NgramDrafter
from engine.speculation.settings import SpeculationSettings


class Drafter(Protocol):
    """Proposes the next tokens of one request, and may keep what it has learned of that request."""

    def propose(self, token_ids: list[TokenId], max_tokens: int) -> list[TokenId]:
        """Return at most `max_tokens` tokens of the vocabulary that may follow; none when it has no idea.

        token_ids: prompt and output so far, not to be changed. The same list in each call, grown at its end.
        """
        ...


class FromTokens(Proposer):
    """Proposes by a request's tokens alone, with a drafter for each."""

    def __init__(self, make_drafter: Callable[[], Drafter], num_tokens: int) -> None:
        """num_tokens: most drafts of one row."""
        self._make_drafter, self._num_tokens = make_drafter, num_tokens

    def propose(self, found: StepResult, sampled: Sequence[Sampled], hidden: Tensor) -> None:
        """See Proposer."""
        for _, row, request, _, _ in sampled:
            if request.prefill_only or not found.token_ids[row] or row in found.draft_token_ids:
                continue
            if request.drafter is None:
                request.drafter = self._make_drafter()
            drafts = request.drafter.propose(request.token_ids, self._num_tokens)
            found.draft_token_ids[row] = drafts[: self._num_tokens]


def open_speculation(config: EngineConfig, runner: Any, on_gpu: bool) -> Speculation | None:
    """Let the runner propose drafts, if they are wanted. On a GPU they are in steps that have a decode graph."""
    settings = config.of(SpeculationSettings)
    if not settings.num_speculative_tokens:
        return None
    runner.propose_with(proposer_for(settings))
    return Speculation(config.max_num_seqs if on_gpu else None)


def proposer_for(settings: SpeculationSettings) -> Proposer:
    make_drafter = partial(NgramDrafter, settings.ngram_max, settings.ngram_min)
    return FromTokens(make_drafter, settings.num_speculative_tokens)
