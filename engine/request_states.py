"""A runner's state of each request between steps, built only from plans. Knows no scheduler and no device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from engine.plan import NewRequest, ScheduledRow, StepPlan
from engine.request import RequestId, TokenId
from engine.wings import Constraints
from kvstore.types import BlockId

LogitsHook = Callable[["RequestState", Any], None]


class RequestState(NewRequest, eq=False, gc=True):
    """One request, from the plan that adds it to the plan that ends it. A preempted request gets a new state.

    token_ids: the prompt and output tokens that this runner knows.
    """

    block_ids: list[BlockId] = msgspec.field(default_factory=list)
    constraint: Any = None  # on the output, a filter of `engine.logit_rules`
    hook: LogitsHook | None = None  # of tests: changes its rows of logits (vocab,) in place, those after drafts too
    refusal: str = ""  # why no token is allowed
    token_mask: Any = None  # of `engine.logit_rules`, made when it is first needed
    drafter: Any = None  # a proposer's, for this request
    pooled: Any = None  # result over the rows so far, see `engine.pooling`
    adapter_weights: Any = None  # on the runner's device
    changes_logits: bool = False  # by `params` or its hook
    wants_logprobs: bool = False

    def __post_init__(self) -> None:
        self.changes_logits = self.params.changes_logits
        self.wants_logprobs = self.params.logprobs is not None

    @property
    def output_token_ids(self) -> list[TokenId]:
        return self.token_ids[self.num_prompt_tokens :]

    def wants_prompt_logprobs(self, row: ScheduledRow) -> bool:
        """Whether the row's hidden states predict prompt tokens whose log-probabilities were asked for."""
        return self.params.prompt_logprobs is not None and row.start + 1 < self.num_prompt_tokens

    def put_token(self, position: int, token_id: TokenId) -> None:
        """Record the token sampled for `position`, and drop the tokens recorded from there on."""
        if len(self.token_ids) == position:
            self.token_ids.append(token_id)
        else:
            self.token_ids[position:] = [token_id]


class RequestStates:
    """States by request id."""

    def __init__(self, constraints: Constraints | None = None) -> None:
        """constraints: None: grammars of requests are ignored."""
        self._constraints = constraints
        self._states: dict[RequestId, RequestState] = {}
        self.hooks: dict[RequestId, LogitsHook] = {}  # of requests to come
        self._reading: set[RequestId] = set()  # requests with hooks or `SamplingParams.reads_tokens`; mostly none

    def apply(self, plan: StepPlan) -> list[RequestState]:
        """Update the states by a plan. Returns the state of each row's request."""
        states = self._states
        for request_id in plan.finished:
            states.pop(request_id, None)
            self._reading.discard(request_id)
        for new in plan.new:
            state = states[new.request_id] = RequestState(*msgspec.structs.astuple(new))
            state.token_ids = list(new.token_ids)
            if new.params.grammar and self._constraints is not None:
                state.constraint = self._constraints.start(new.params)
            if new.request_id in self.hooks:
                state.hook, state.changes_logits = self.hooks[new.request_id], True
            if new.params.reads_tokens or state.hook is not None:
                self._reading.add(new.request_id)
        row_states = []
        for row in plan.rows:
            state = states[row.request_id]
            if row.new_block_ids:
                state.block_ids += row.new_block_ids
            row_states.append(state)
        return row_states

    def needs_tokens(self, rows: Iterable[ScheduledRow]) -> bool:
        """Whether the tokens that some row may sample depend on tokens that are not known here yet."""
        reading = self._reading
        return bool(reading) and any(
            row.samples and row.request_id in reading and row.stop > len(self._states[row.request_id].token_ids)
            for row in rows
        )

    def clear(self) -> None:
        self._states.clear()
        self._reading.clear()
