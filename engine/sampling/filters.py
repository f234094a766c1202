"""What filters of tokens are: which tokens one request may not get next, as plain arrays of bits.

`engine/logit_rules` has the filters of a request's parameters, and asks all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.request import SamplingParams, TokenId

Words = NDArray[np.uint32]  # one bit a token: bit i of word w is token 32 w + i


class Filtered(Protocol):
    """What filters read of a request: see `RequestState`."""

    token_ids: list[TokenId]
    num_prompt_tokens: int
    params: SamplingParams
    eos_token_ids: frozenset[TokenId]
    constraint: Constraint | None
    refusal: str


class TokenFilter(Protocol):
    """Forbids tokens to one request. `engine.logit_rules.filters.filters_of` lists all kinds.

    A filter that reads the request's tokens needs all of them before `position`: its parameter belongs into
    `SamplingParams.reads_tokens`, so that a runner waits for them.
    """

    def state(self, request: Filtered, position: int) -> Hashable:
        """What the filter's answer for `position` depends on: while it is the same, so is the answer."""
        ...

    def block(self, blocked: Words, request: Filtered, position: int) -> None:
        """Set the bits of tokens that may not come at `position`."""
        ...


class Constraint(TokenFilter, Protocol):
    """The filter of an answer that must have a form, which costs time: computed for all rows of a step at once."""

    def prepare(self, wanted: Sequence[tuple[Filtered, int]]) -> None:
        """Compute what `block` will say of all constrained requests of a step at their positions, these included."""
        ...


class Constraints(Protocol):
    """Makes constraints for the requests of one engine. A wing provides it (`engine/grammar`)."""

    def prepare(self) -> Future[object]:
        """Load what the first constraint would wait for. The future's exception: this model takes none."""
        ...

    def readiness(self, params: SamplingParams) -> Callable[[], bool]:
        """Begin to compile the request's constraint. While the function says False, the request gets no row."""
        ...

    def start(self, params: SamplingParams) -> Constraint:
        """The constraint of a new answer."""
        ...
