"""Token filters: which tokens a request may not get next, as bits, and the mask of all its filters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.request_states import RequestState

Words = NDArray[np.uint32]  # one bit per token: bit i of word w is token 32 w + i


class TokenFilter(Protocol):
    """Forbids tokens to one request. `filters_of` lists all kinds.

    A filter that reads the request's tokens needs all of them before `position`: add its parameter to
    `SamplingParams.reads_tokens`, so that the runner waits for them.
    """

    def state(self, request: RequestState, position: int) -> Hashable:
        """Return what the filter's answer for `position` depends on; equal states give equal answers."""
        ...

    def block(self, blocked: Words, request: RequestState, position: int) -> None:
        """Set the bits of tokens that are not allowed at `position`."""
        ...


class Constraint(TokenFilter, Protocol):
    """A filter for answers of a prescribed form, which takes time: computed for all rows of a step at once."""

    def prepare(self, wanted: Sequence[tuple[RequestState, int]]) -> None:
        """Compute `block` for all constrained requests of a step, at these positions."""
        ...


def set_bits(words: Words, token_ids: Sequence[int]) -> None:
    ids = np.array(token_ids, dtype=np.uint32)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31))


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Allow only the given tokens."""

    token_ids: Sequence[int]

    def state(self, request: RequestState, position: int) -> Hashable:
        return None

    def block(self, blocked: Words, request: RequestState, position: int) -> None:
        allowed = np.zeros_like(blocked)
        set_bits(allowed, self.token_ids)
        blocked |= ~allowed


@dataclass(frozen=True, slots=True)
class BadWords:
    """Forbid tokens that complete one of these sequences."""

    words: Sequence[Sequence[int]]

    def state(self, request: RequestState, position: int) -> Hashable:
        return tuple(self._last_tokens(request, position))

    def block(self, blocked: Words, request: RequestState, position: int) -> None:
        set_bits(blocked, self._last_tokens(request, position))

    def _last_tokens(self, request: RequestState, position: int) -> list[int]:
        """Return the last tokens of words whose other tokens end the sequence."""
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


def filters_of(request: RequestState) -> list[TokenFilter]:
    """Return the filters that the request's parameters ask for."""
    params = request.params
    filters: list[TokenFilter] = []
    if params.allowed_token_ids:
        filters.append(AllowedTokens(params.allowed_token_ids))
    if params.bad_words:
        filters.append(BadWords(params.bad_words))
    if params.min_tokens:
        ends = () if params.ignore_eos else tuple(request.eos_token_ids)
        filters.append(MinTokens(params.min_tokens, params.stop_token_ids + ends))
    if request.constraint is not None:
        filters.append(request.constraint)
    return filters


def prepare_constraints(requests: Sequence[RequestState], positions: Sequence[int]) -> None:
    """Prepare the constraints of all rows before the first is used, see `Constraint.prepare`."""
    wanted = [pair for pair in zip(requests, positions, strict=True) if pair[0].constraint is not None]
    if wanted:
        first: Constraint = wanted[0][0].constraint
        first.prepare(wanted)


class TokenMask:
    """The tokens that one request may not get next, recomputed only when a filter's state changes."""

    def __init__(self, request: RequestState, vocab_size: int) -> None:
        self.blocked: Words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        self._request = request
        self._filters = filters_of(request)
        self._state: tuple[Hashable, ...] | None = None

    @property
    def has_filters(self) -> bool:
        """Whether the request has any filter."""
        return bool(self._filters)

    def update(self, position: int) -> bool:
        """Update `blocked` for `position`. Returns whether its filters' state changed."""
        request, filters = self._request, self._filters
        state = tuple(each.state(request, position) for each in filters)
        if state == self._state:
            return False
        self._state = state
        self.blocked.fill(0)
        for each in filters:
            each.block(self.blocked, request, position)
        return True
