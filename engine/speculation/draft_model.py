"""A draft model: a small model with the same tokenizer, in the same process, generates the drafts.

It has its own KV pool and prefix cache, so it can follow any request, wherever the request's KV comes from. Tokens
that it has not seen yet are computed first, up to a limit per step. It samples with the request's own parameters and
noise, so its drafts agree with the model's tokens at temperatures above 0, too.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.cpu.runner import CpuRunner
from engine.kv.manager import KVManager
from engine.plan import ScheduledRow, StepResult
from engine.request import Request, RequestId, TokenId
from engine.request_states import RequestState
from engine.runner import ModelRunner, Sampled
from engine.speculation.draft_length import DraftLengths
from engine.speculation.from_model import Drafting, FromModel, params_of_drafts
from engine.speculation.from_tokens import most_drafts


class DraftRunner(CpuRunner):
    """Runs rows of request states that its caller keeps."""

    @torch.inference_mode()
    def run(self, rows: list[ScheduledRow], states: list[RequestState]) -> StepResult:
        return self._run(rows, states)


@dataclass(frozen=True, slots=True)
class VocabSizes:
    """Vocabulary sizes, which differ between models of one tokenizer by the unused tokens at the end."""

    of_target: int
    of_draft: int


@dataclass(slots=True)
class Followed(Drafting):
    """A request of the target model as the draft model follows it."""

    owner: Request  # owns blocks of the draft model's pool
    state: RequestState  # the known tokens, followed by drafts
    is_foreign: bool = False  # the text has a token that the draft model lacks

    def update(self, token_ids: Sequence[TokenId], vocab_size: int) -> None:
        """Add the tokens sampled since. Keeps the KV of drafts that were right."""
        state, owner = self.state, self.owner
        new = token_ids[self.num_known :]
        num_right = 0
        # Without the last token: a row computes at least one.
        for drafted, token_id in zip(state.token_ids[self.num_known :], new[:-1], strict=False):
            if drafted != token_id:
                break
            num_right += 1
        owner.num_computed_tokens = min(owner.num_computed_tokens, self.num_known + num_right)
        state.token_ids[self.num_known :] = new
        owner.output_token_ids += new
        self.num_known = len(token_ids)
        self.is_foreign |= max(new, default=0) >= vocab_size


DraftRow = tuple[Followed, int, int]
"""A request, the number of its tokens that a pass computes, and the most drafts it may have."""


class FromDraftModel(FromModel):
    """Drafts for requests of the target model, with a KV pool of the draft model. runner: of the draft model."""

    runner: ModelRunner

    def __init__(
        self, kv: KVManager, lengths: DraftLengths, num_tokens: int, max_step_tokens: int,
        max_model_len: int, vocab_sizes: VocabSizes,
    ) -> None:  # fmt: skip
        """num_tokens: most drafts of a row. max_step_tokens: most tokens that the draft model computes after a step
        to catch up. max_model_len: of the draft model.
        """
        super().__init__(lengths)
        self._kv = kv
        self._num_tokens, self._max_step_tokens = num_tokens, max_step_tokens
        self._max_model_len, self._vocab_sizes = max_model_len, vocab_sizes
        self._followed: dict[RequestId, Followed] = {}

    def propose(self, found: StepResult, sampled: Sequence[Sampled]) -> None:
        """See Proposer."""
        began = time.monotonic()
        rows: dict[int, tuple[Followed, int]] = {}
        for _, row, request, _, _ in sampled:
            most = 0 if request.prefill_only else most_drafts(request, self._num_tokens)
            if row in rows or not most or not found.token_ids[row]:
                continue
            followed = self._follow(request)
            self._acceptance.learn(followed.record, found.token_ids[row])
            followed.begin()
            followed.update(request.token_ids, self._vocab_sizes.of_draft)
            most = min(most, self._max_model_len - followed.num_known)
            if most > 0 and not followed.is_foreign:
                rows[row] = followed, most
        self._draft([entry for entry in rows.values() if self._is_worth_drafting(entry[0], len(rows))], len(rows))
        for row, (followed, _) in rows.items():
            if followed.drafts.token_ids:
                found.drafts[row] = followed.taken()
        self._lengths.exclude(time.monotonic() - began)

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """See Proposer."""
        for request_id in request_ids:
            followed = self._followed.pop(request_id, None)
            if followed is not None:
                self._kv.release(followed.owner)

    def _follow(self, request: RequestState) -> Followed:
        if isinstance(request.drafter, Followed):
            return request.drafter
        self.forget([request.request_id])
        vocab_size = self._vocab_sizes.of_draft
        params = params_of_drafts(request.params, vocab_size)
        token_ids = list(request.token_ids)
        owner = Request(request.request_id, token_ids, params, cache_salt=request.cache_salt)
        state = RequestState(request.request_id, list(token_ids), request.num_prompt_tokens, params)
        owner.num_computed_tokens = self._kv.attach_cached(owner, owner.num_reusable_tokens)
        followed = request.drafter = self._followed[request.request_id] = Followed(
            owner, state, num_known=len(token_ids)
        )
        followed.is_foreign = max(token_ids) >= vocab_size
        return followed

    @abstractmethod
    def _draft(self, wanted: list[tuple[Followed, int]], num_rows: int) -> None:
        """Draft for these requests, at most the given number of tokens each. num_rows: of the step."""

    def _first_rows(self, wanted: list[tuple[Followed, int]]) -> list[DraftRow]:
        """Return rows of known tokens without KV, for the requests that miss the fewest first."""
        left, rows = self._max_step_tokens, []
        for followed, most in sorted(
            wanted, key=lambda entry: entry[0].num_known - entry[0].owner.num_computed_tokens
        ):
            missing = followed.num_known - followed.owner.num_computed_tokens
            followed.probability = 1.0
            if left and self._kv.grow(followed.owner, followed.num_known + most):
                rows.append((followed, min(missing, left), most))
                left -= min(missing, left)
        return rows


class FromCpuDraftModel(FromDraftModel):
    """Proposes the tokens of a draft model on the CPU, and decides after each pass whether another one pays."""

    def __init__(self, runner: DraftRunner, *args: Any) -> None:
        """args: of FromDraftModel."""
        super().__init__(*args)
        self.runner: DraftRunner = runner

    def keep_distributions(self, vocab_size: int) -> None:
        """See FromModel."""
        super().keep_distributions(vocab_size)
        self.runner.sample_with(self._sampler)

    def _draft(self, wanted: list[tuple[Followed, int]], num_rows: int) -> None:
        drafting = self._catch_up(wanted)
        while drafting:
            least = self._least_probability(num_rows, len(drafting))
            drafting = [
                (followed, most)
                for followed, most in drafting
                if len(followed.drafts.token_ids) < most and followed.probability > least
            ]
            if drafting:
                began = time.monotonic()
                drafting = self._pass([(followed, 1, most) for followed, most in drafting])
                self._times.observe(len(drafting), 0, time.monotonic() - began)

    def _catch_up(self, wanted: list[tuple[Followed, int]]) -> list[tuple[Followed, int]]:
        """Compute the KV of all known tokens. Returns the requests that have a first draft now."""
        rows = self._first_rows(wanted)
        return self._pass(rows) if rows else []

    def _pass(self, rows: list[DraftRow]) -> list[tuple[Followed, int]]:
        """Compute the next tokens of each request. Returns the requests that got a draft, with their most drafts."""
        plan, states = planned(rows)
        result = self.runner.run(plan, states)
        drafted, distributions = [], iter(self._sampler.distributions)
        for index, (followed, _, most) in enumerate(rows):
            self._kv.publish(followed.owner)
            distribution = next(distributions, None) if plan[index].samples else None
            token_ids = result.token_ids[index]
            if token_ids and token_ids[0] < self._vocab_sizes.of_target:
                self._add_draft(followed, token_ids[0], result.logprobs[index][0].logprob, distribution)
                drafted.append((followed, most))
        return drafted


def planned(rows: Sequence[DraftRow]) -> tuple[list[ScheduledRow], list[RequestState]]:
    """Plan a pass. Its tokens count as computed from now on."""
    plan, states = [], []
    for followed, num_tokens, _ in rows:
        owner, state = followed.owner, followed.state
        state.block_ids = owner.block_ids
        start = owner.num_computed_tokens
        owner.num_computed_tokens += num_tokens
        plan.append(
            ScheduledRow(owner.request_id, start, num_tokens, owner.num_computed_tokens >= followed.num_known)
        )
        states.append(state)
    return plan, states
