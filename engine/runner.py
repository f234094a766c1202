"""The part of a runner that is the same on all devices: states of requests, other ranks, results of sampling.

`engine/cpu/runner.py` and `engine/gpu/runner.py` compute the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.loader.load import LoadedModel
from engine.plan import PendingStep, ScheduledRow, StepPlan, StepResult
from engine.ranks import RankContext
from engine.request import RequestId, TokenId, TokenLogprobs
from engine.request_states import RequestState, RequestStates

if TYPE_CHECKING:
    from engine.host_tier.copies import Copies
    from engine.layers.block import Step
    from engine.layers.forward import Forward
    from engine.models.model import Model

NOT_FINITE, NOTHING_ALLOWED = -1, -2  # in the place of a token, as in kernels/gpu/sampling.py
NO_TOKEN = {NOT_FINITE: "the model's output is not finite", NOTHING_ALLOWED: "no token is allowed at this position"}
NO_DRAFT = -1
Sampled = tuple[int, int, RequestState, int, TokenId]
"""Index among the step's sampled tokens, row of the plan, request, position, and the draft for that position."""


class Proposer:
    """Proposes drafts after a step has been sampled. This one proposes none.

    layers: the layers whose input residual it reads, in rising order; the number of layers: after the last one.
    """

    layers: tuple[int, ...] = ()

    def watch(self, model: Model, forward: Forward[Step, Tensor]) -> Forward[Step, Tensor]:
        """Return the forward pass with the residual observed. Called on CPUs, if there are `layers`."""
        return forward

    def observe(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> None:
        """Process a forward pass over these rows, before tokens are sampled. Called on CPUs."""

    def propose(self, found: StepResult, sampled: Sequence[Sampled]) -> None:
        """Put drafts into `found.drafts` for rows of `sampled` with tokens; requests' states have these already."""

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Drop the state of requests that have ended or were preempted."""


class ModelRunner(ABC):
    """A `Runner` of one model over one KV pool."""

    max_steps_in_flight = 1
    copies_beside_steps = False
    attention_backend: str
    """The name of the attention backend; on a GPU of the prefill attention backend."""

    def __init__(
        self, loaded: LoadedModel, kv_pool: Tensor, host_buffer: Tensor | None, ranks: RankContext[Any]
    ) -> None:
        """host_buffer: uint8 (num_slots, block_bytes), or None without host slots."""
        self._pool = kv_pool
        self._copies: Copies | None = None
        if host_buffer is not None:
            from engine.host_tier.copies import open_copies

            self._copies = open_copies(kv_pool, host_buffer, self.copies_beside_steps)
        self._proposer = Proposer()
        self._on_work: Callable[[], object] = lambda: None
        self._requests = RequestStates(loaded.constraints)
        self.hooks = self._requests.hooks
        self._vector_modules = loaded.vector_modules
        self._ranks = ranks

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        if plan.finished:
            self._proposer.forget(plan.finished)
        requests = self._requests.apply(plan)
        self._ranks.listener.on_plan(plan)
        step = self._launch(plan, requests)
        if not self._ranks.passes_on:
            return step
        from engine.pipeline_parallel.unsampled import UnsampledStep

        return UnsampledStep(plan.rows, requests, step)

    @abstractmethod
    def _launch(self, plan: StepPlan, requests: Sequence[RequestState]) -> PendingStep:
        """Do the plan's copies and compute its rows. requests: one for each row."""

    def _copy(self, plan: StepPlan) -> list[Callable[[], None]]:
        """Start the plan's copies. Returns functions that wait for them."""
        if not (plan.copies_out or plan.copies_in):
            return []
        assert self._copies is not None, "a plan copies to host slots that do not exist"
        return [self._copies.out(plan.copies_out), self._copies.into(plan.copies_in)]

    def propose_with(self, proposer: Proposer) -> None:
        """Draft with `proposer` from the next step on."""
        self._proposer = proposer

    def tell_of_work(self, on_work: Callable[[], object]) -> None:
        """Call `on_work` in every layer, where a step keeps the host busy."""
        self._on_work = on_work

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        """See Runner: those with hooks, or with filters that read a request's own tokens."""
        return self._requests.needs_tokens(plan.rows)

    def _read_hidden(
        self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState], hidden: Tensor,
        end_of: Callable[[int], int], logits_of: Callable[[Tensor], Tensor], result: StepResult,
    ) -> None:  # fmt: skip
        """Add the results that need hidden states: log-probabilities of prompt tokens, and pooled vectors.

        end_of: row index -> end of the row's hidden states. logits_of: hidden states -> logits, a call of all ranks.
        """
        if any(map(RequestState.wants_prompt_logprobs, requests, rows)):
            from engine.logprobs.logprobs import add_prompt_logprobs

            add_prompt_logprobs(rows, requests, hidden, end_of, logits_of, result)
        if any(request.params.pooling for request in requests):
            from engine.pooling.vectors import add_vectors

            add_vectors(rows, requests, hidden, end_of, result, self._vector_modules)

    def check(self) -> None:  # noqa: B027
        """See Runner. Here only a step notices a lost device."""


def sampled_queries(
    rows: Sequence[ScheduledRow], requests: Sequence[RequestState], indices: Iterable[int]
) -> list[Sampled]:
    """Return an entry for each token sampled by rows `indices`: after the last known token and after each draft."""
    entries: list[Sampled] = []
    for i in indices:
        drafts, request = rows[i].draft_token_ids, requests[i]
        for position, draft in enumerate((*drafts, NO_DRAFT), rows[i].stop - len(drafts)):
            entries.append((len(entries), i, request, position, draft))
    return entries


def settle(
    result: StepResult, sampled: Sequence[Sampled], values: Sequence[int],
    logprobs: Iterable[tuple[int, TokenLogprobs]] = (),
) -> None:  # fmt: skip
    """Put sampled tokens into the result and into the requests' states, up to each row's first wrong draft.

    values: tokens, negative if there is none, see `no_token_error`. A row's entries of `sampled` are in the order of
    positions. logprobs: (index of the entry, its log-probabilities).
    """
    ended: set[int] = set()  # rows whose further entries do not count
    for index, row, request, position, draft in sampled:
        if row in ended:
            continue
        token_id = values[index]
        if token_id < 0:
            ended.add(row)
            if not result.token_ids[row]:  # else the next step begins at this position and fails
                result.errors[row] = no_token_error(request, token_id)
            continue
        request.put_token(position, token_id)
        result.token_ids[row].append(token_id)
        if draft not in (NO_DRAFT, token_id):
            ended.add(row)
    for k, entry in logprobs:
        row = sampled[k][1]
        if len(result.logprobs[row]) < len(result.token_ids[row]):
            result.logprobs[row].append(entry)


def no_token_error(request: RequestState, reason: int) -> str:
    """Return why a row has no token. reason: NOT_FINITE, or NOTHING_ALLOWED, which a grammar may explain."""
    return (request.refusal if reason == NOTHING_ALLOWED else "") or NO_TOKEN[reason]


def reads_hidden(row: ScheduledRow, request: RequestState) -> bool:
    """Whether the row's hidden states are needed for more than its next token."""
    return bool(request.params.pooling) or request.wants_prompt_logprobs(row)
