"""Grammars as constraints of the sampler: `Constraint` says what it asks of them."""

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
    """Allow only tokens that continue the output as its grammar has it.

    The last filter: where the others leave none of these tokens (`min_tokens` of an answer that is complete), they
    give way. At a limit of the grammar's nothing is allowed, which fails the row, with the reason in its request.
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
        return object()  # another one for each token, and for drafts at the same position

    def block(self, blocked: Words, request: RequestState, position: int) -> None:
        try:
            allowed = self.matcher.result().allowed(_output(request, position))
        except MiniInferError as error:
            request.refusal = str(error)
            blocked.fill(~np.uint32(0))
            return
        if allowed is None:  # behind a draft that will be refused
            return
        if (allowed & ~blocked).any():
            blocked |= ~allowed
        else:
            np.invert(allowed, out=blocked)


def _output(request: RequestState, position: int) -> list[int]:
    return request.token_ids[request.num_prompt_tokens : position]


def constraints_over(tokenizer: Callable[[], Tokenizer], vocab_size: int) -> GrammarConstraints:
    """The constraints of a model with these tokens."""
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
