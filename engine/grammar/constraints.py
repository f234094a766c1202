"""Grammars as constraints of the sampler, see `Constraint`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from common.errors import MiniInferError
from common.text.tokenizer import Tokenizer
from engine.grammar.grammars import GrammarMatcher, Grammars, compute_masks
from engine.logit_rules.filters import Words
from engine.request import Request, SamplingParams
from engine.request_states import RequestState


@dataclass(frozen=True, slots=True)
class FollowGrammar:
    """Allow only tokens that continue the output according to its grammar.

    This is the last filter. If other filters leave none of its tokens (`min_tokens` of a complete answer), they give
    way. At a limit of the grammar nothing is allowed, which fails the row, with the reason in its request.
    """

    matcher: Future[GrammarMatcher]

    def prepare(self, wanted: Sequence[tuple[RequestState, int]]) -> None:
        found = []
        for request, position in wanted:
            constraint = request.constraint
            if isinstance(constraint, FollowGrammar) and constraint.matcher.exception() is None:
                found.append((constraint.matcher.result(), _output(request, position)))
        compute_masks(found)

    def state(self, request: RequestState, position: int) -> Hashable:
        return object()  # differs for every token, and for drafts at the same position

    def block(self, blocked: Words, request: RequestState, position: int) -> None:
        try:
            allowed = self.matcher.result().allowed(_output(request, position))
        except MiniInferError as error:
            request.refusal = str(error)
            blocked.fill(~np.uint32(0))
            return
        if allowed is None:  # after a draft that will be rejected
            return
        if (allowed & ~blocked).any():
            blocked |= ~allowed
        else:
            np.invert(allowed, out=blocked)


def _output(request: RequestState, position: int) -> list[int]:
    return request.token_ids[request.num_prompt_tokens : position]


def constraints_over(tokenizer: Callable[[], Tokenizer], vocab_size: int) -> GrammarConstraints:
    """Return the constraints of a model with this tokenizer."""
    return GrammarConstraints(Grammars(tokenizer, vocab_size))


class GrammarConstraints:
    """The `Constraints` of an engine whose requests may name grammars."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def prepare(self) -> Future[object]:
        return self._grammars.prepare()

    def prepare_request(self, request: Request) -> None:
        if grammar := request.params.grammar:
            request.is_ready = self._grammars.compile(grammar).done  # holds what is compiled: `start` finds it

    def start(self, params: SamplingParams) -> FollowGrammar:
        return FollowGrammar(self._grammars.start(params.grammar))
