"""Logits processing: what a request's parameters do to its logits before a token is sampled.

In this order: minus infinity for tokens that may not come now (`TokenFilter`s, a grammar), biases, penalties:
repetition: l > 0 ? l / r : l * r for every token in prompt and output;
frequency and presence: l -= f * count + p * (count > 0) over the output.

`apply_params` does so for one row of logits anywhere; `engine/gpu/sampling/logits_columns.py` for all rows of a step
on the device, from the same masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common.errors import MiniInferError
from engine.grammar.grammars import GrammarMatcher, Words, compute_masks
from engine.request_states import RequestState

MINUS_INFINITY = float("-inf")


class TokenFilter(Protocol):
    """Forbids tokens to one request. `filters_of` lists all kinds.

    A filter that reads the request's tokens needs all of them before `position`: its parameter belongs into
    `SamplingParams.reads_tokens`, so that a runner waits for them.
    """

    def state(self, request: RequestState, position: int) -> Hashable:
        """What the filter's answer for `position` depends on: while it is the same, so is the answer."""
        ...

    def block(self, blocked: Words, request: RequestState, position: int) -> None:
        """Set the bits of tokens that may not come at `position`."""
        ...


def set_bits(words: Words, token_ids: Sequence[int]) -> None:
    ids = np.array(token_ids, dtype=np.uint32)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31))


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Allow only these tokens."""

    token_ids: Sequence[int]

    def state(self, request: RequestState, position: int) -> Hashable:
        return None

    def block(self, blocked: Words, request: RequestState, position: int) -> None:
        allowed = np.zeros_like(blocked)
        set_bits(allowed, self.token_ids)
        blocked |= ~allowed


@dataclass(frozen=True, slots=True)
class BadWords:
    """Forbid a token that completes one of these sequences."""

    words: Sequence[Sequence[int]]

    def state(self, request: RequestState, position: int) -> Hashable:
        return tuple(self._last_tokens(request, position))

    def block(self, blocked: Words, request: RequestState, position: int) -> None:
        set_bits(blocked, self._last_tokens(request, position))

    def _last_tokens(self, request: RequestState, position: int) -> list[int]:
        """Last tokens of the words whose other tokens the sequence ends with."""
        begun = []
        for *head, last in self.words:
            if len(head) <= position and request.token_ids[position - len(head) : position] == head:
                begun.append(last)
        return begun


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Forbid tokens that would end the request too early."""

    min_tokens: int
    token_ids: Sequence[int]

    def state(self, request: RequestState, position: int) -> Hashable:
        return position - request.num_prompt_tokens < self.min_tokens

    def block(self, blocked: Words, request: RequestState, position: int) -> None:
        if self.state(request, position):
            set_bits(blocked, self.token_ids)


@dataclass(frozen=True, slots=True)
class FollowGrammar:
    """Allow only tokens that continue the output as its grammar has it.

    The last filter: where the others leave none of these tokens (`min_tokens` of an answer that is complete), they
    give way. At a limit of the grammar's nothing is allowed, which fails the row, with the reason in its request.
    """

    matcher: Future[GrammarMatcher]

    def state(self, request: RequestState, position: int) -> Hashable:
        return object()  # another one for each token, and for drafts at the same position

    def block(self, blocked: Words, request: RequestState, position: int) -> None:
        try:
            allowed = self.matcher.result().allowed(request.token_ids[request.num_prompt_tokens : position])
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


def prepare_masks(requests: Sequence[RequestState], positions: Sequence[int]) -> None:
    """Compute what grammars allow at each position, all before the first is used: see `compute_masks`."""
    wanted = []
    for request, position in zip(requests, positions, strict=True):
        if request.matcher is not None and request.matcher.exception() is None:
            output = request.token_ids[request.num_prompt_tokens : position]
            wanted.append((request.matcher.result(), output))
    compute_masks(wanted)


def filters_of(request: RequestState) -> list[TokenFilter]:
    """The filters that the request's parameters ask for."""
    params = request.params
    filters: list[TokenFilter] = []
    if params.allowed_token_ids:
        filters.append(AllowedTokens(params.allowed_token_ids))
    if params.bad_words:
        filters.append(BadWords(params.bad_words))
    if params.min_tokens:
        ends = () if params.ignore_eos else tuple(request.eos_token_ids)
        filters.append(MinTokens(params.min_tokens, params.stop_token_ids + ends))
    if request.matcher is not None:
        filters.append(FollowGrammar(request.matcher))
    return filters


class TokenMask:
    """Which tokens one request may not get next, computed only when its filters say something new."""

    def __init__(self, request: RequestState, vocab_size: int) -> None:
        self.blocked: Words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        self._request = request
        self._filters = filters_of(request)
        self._state: tuple[Hashable, ...] | None = None

    @property
    def has_filters(self) -> bool:
        """Whether any token may ever be blocked."""
        return bool(self._filters)

    def update(self, position: int) -> bool:
        """Update `blocked` for `position`; True when it changed."""
        request, filters = self._request, self._filters
        state = tuple(each.state(request, position) for each in filters)
        if state == self._state:
            return False
        self._state = state
        self.blocked.fill(0)
        for each in filters:
            each.block(self.blocked, request, position)
        return True


def apply_params(row: Tensor, request: RequestState, position: int) -> None:
    """Change `row` (vocab,) float32 in place for the token at `position`, all tokens before it being known."""
    params = request.params
    mask = request.token_mask
    if mask is None:
        mask = request.token_mask = TokenMask(request, row.shape[0])
    if mask.has_filters:
        mask.update(position)
        blocked = np.unpackbits(mask.blocked.view(np.uint8), count=row.shape[0], bitorder="little").view(np.bool_)
        row.masked_fill_(torch.from_numpy(blocked).to(row.device), MINUS_INFINITY)
    if params.logit_bias:
        biased = torch.tensor([token_id for token_id, _ in params.logit_bias], device=row.device)
        biases = torch.tensor([bias for _, bias in params.logit_bias], device=row.device)
        row.index_add_(0, biased, biases)
    known = request.token_ids[:position]
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(list(set(known)), device=row.device)
        values = row[ids]
        row[ids] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        counts = Counter(known[request.num_prompt_tokens :])
        if counts:
            ids = torch.tensor(list(counts), device=row.device)
            amounts = torch.tensor(list(counts.values()), dtype=torch.float32, device=row.device)
            row[ids] -= amounts * params.frequency_penalty + params.presence_penalty
