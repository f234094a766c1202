"""Drafts by a draft model on a GPU: each pass takes the previous pass's token from the device.

The host decides the number of passes first, queues all of them and waits once, for the last.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine.gpu.forward import FusedForward
from engine.gpu.pinning import upload
from engine.gpu.runner import GpuRunner
from engine.gpu.steps.decode_steps import LENGTH, DecodeSteps
from engine.gpu.steps.step import GpuBatch, GpuStep, sampled_rows
from engine.plan import ScheduledRow, StepResult
from engine.query_steps.steps import DraftSteps, has_drafts
from engine.request_states import RequestState
from engine.runner import Sampled
from engine.speculation.acceptance import Acceptance, DraftRecord
from engine.speculation.draft_length import DraftLengths
from engine.speculation.draft_model import DraftRow, Followed, FromDraftModel, planned
from engine.speculation.from_model import NUM_KINDS
from engine.speculation.overlap import Overlap


class GpuDraftRunner(GpuRunner):
    """Runs rows of request states that its caller keeps."""

    def __init__(self, num_passes: int, *args: Any) -> None:
        """num_passes: most passes that are queued before the first is waited for. args: of GpuRunner."""
        self.least_buffers = num_passes + 1
        super().__init__(*args)
        self.max_queries = self._max_rows

    @torch.inference_mode()
    def queue(self, rows: Sequence[ScheduledRow], states: Sequence[RequestState]) -> GpuStep:
        """Queue a pass. A token that a row's state does not have yet is the one sampled by the previous pass."""
        return self._launch_rows(rows, states)

    def _open_decodes(self, forward: FusedForward) -> DecodeSteps:
        return DraftModelSteps(forward, *self.device_rows, self._num_buffers, self._block_size)


class DraftModelSteps(DraftSteps):
    """Steps whose rows have one or more known tokens, those that the draft model has not computed yet.

    So the token sampled after a row's last query is the row's token.
    """

    def queue(self, batch: GpuBatch, step: GpuStep) -> None:
        """See DecodeSteps."""
        if not has_drafts(batch):
            self._upload_known(batch)
        super().queue(batch, step)

    def _upload_known(self, batch: GpuBatch) -> None:
        """Correct last tokens: the device has the last drafts there, which the target model may have rejected."""
        known = [
            (device_row, state.token_ids[row.start])
            for device_row, row, state in zip(batch.device_rows, batch.rows, batch.requests, strict=True)
            if row.start < len(state.token_ids)
        ]
        if known:
            last_tokens = self._state.last_tokens
            places, token_ids = upload(list(zip(*known, strict=True)), torch.int64, last_tokens.device)
            last_tokens[places] = token_ids

    def _sampled(self, batch: GpuBatch) -> list[Sampled]:
        last = [end - 1 for end in accumulate(row.num_tokens for row in batch.rows)]
        return sampled_rows(batch, range(len(batch.rows)), last)

    def _are_last(self, queries: Tensor, rows: Tensor, sampled: Tensor) -> Tensor:
        in_use = queries[LENGTH] > 0
        is_last = in_use.clone()
        is_last[:-1] &= (rows[1:] != rows[:-1]) | ~in_use[1:]
        return is_last


class FromGpuDraftModel(FromDraftModel):
    """Proposes the tokens of a draft model on the target's GPU."""

    def __init__(self, runner: GpuDraftRunner, overlap: Overlap | None, *args: Any) -> None:
        """overlap: nothing is drafted while steps overlap, since passes would wait for the next step. args: the other
        arguments of FromDraftModel.
        """
        super().__init__(*args)
        self.runner: GpuDraftRunner = runner
        self._overlap = overlap

    def propose(self, found: StepResult, sampled: Sequence[Sampled]) -> None:
        """See Proposer."""
        if self._overlap is None or self._overlap.waits:
            super().propose(found, sampled)

    def _follow(self, request: RequestState) -> Followed:
        is_new = not isinstance(request.drafter, Followed)
        followed = super()._follow(request)
        if is_new:
            followed.state.wants_logprobs = False
        return followed

    def _draft(self, wanted: list[tuple[Followed, int]], num_rows: int) -> None:
        # On a GPU, rows whose logits have rules get no drafts.
        rows = self._first_rows([entry for entry in wanted if not entry[0].state.changes_logits])
        if not rows:
            return
        began = time.monotonic()
        catches_up = any(num_tokens > self._num_tokens + 1 for _, num_tokens, _ in rows)
        length = best_length(
            [(followed.record, most) for followed, _, most in rows], num_rows, self._lengths,
            self._times.cost.seconds(len(rows)), self._acceptance,
        )  # fmt: skip
        passes: list[tuple[list[DraftRow], GpuStep]] = []
        while rows:
            plan, states = planned(rows)
            self._name_known_tokens(plan, states)
            passes.append((rows, self.runner.queue(plan, states)))
            goes_on = len(passes) < length
            rows = [
                (followed, 1, most)
                for (followed, _, most), row in zip(rows, plan, strict=True)
                if goes_on and row.samples and most > len(passes)
            ]
        self._take_all(passes)
        if not catches_up:
            self._times.observe(len(passes[0][0]), 0, (time.monotonic() - began) / len(passes))

    def _name_known_tokens(self, plan: Sequence[ScheduledRow], states: Sequence[RequestState]) -> None:
        """Pass known tokens as drafts, so that decode kernels compute them as queries, if there are few."""
        if sum(row.num_tokens for row in plan) <= self.runner.max_queries:
            for row, state in zip(plan, states, strict=True):
                row.draft_token_ids = tuple(state.token_ids[row.start + 1 : row.stop])

    def _take_all(self, passes: Sequence[tuple[list[DraftRow], GpuStep]]) -> None:
        """Add the tokens of all passes. A row ends at a token that the target model does not have.

        A draft's kind is its number here: computing its probability would take half as long as the pass.
        """
        ended: dict[int, Followed] = {}
        for rows, step in passes:
            for (followed, _, _), token_ids in zip(rows, step.result().token_ids, strict=True):
                if id(followed) in ended:
                    continue
                if token_ids and token_ids[0] < self._vocab_sizes.of_target:
                    self._add_draft_of_kind(followed, token_ids[0], kind_of(len(followed.drafts.token_ids) + 1))
                else:
                    ended[id(followed)] = followed
        for followed in ended.values():
            num_valid = followed.num_known + len(followed.drafts.token_ids)
            del followed.state.token_ids[num_valid:]
            followed.owner.num_computed_tokens = min(followed.owner.num_computed_tokens, num_valid)
        for followed, _, _ in passes[0][0]:
            self._kv.publish(followed.owner)


def kind_of(number: int) -> int:
    """Return the kind of a request's first, second, ... draft of a step."""
    return min(number, NUM_KINDS) - 1


def best_length(
    rows: Sequence[tuple[DraftRecord, int]], num_rows: int, lengths: DraftLengths, pass_seconds: float,
    acceptance: Acceptance,
) -> int:  # fmt: skip
    """Return the number of passes with the most tokens per second. All rows get as many drafts, since a pass takes
    about the same time for few rows as for many.

    rows: those to draft for, and the most drafts of each. num_rows: of the step.
    """
    longest = max(most for _, most in rows)
    if not lengths.is_adaptive or not lengths.cost.base or not pass_seconds:
        return longest
    best, best_speed = 1, 0.0
    tokens, probabilities = float(num_rows), [1.0] * len(rows)
    for length in range(1, longest + 1):
        for index, (record, most) in enumerate(rows):
            if length <= most:
                probabilities[index] *= acceptance.of_kind(record, kind_of(length))
                tokens += probabilities[index]
        speed = tokens / (lengths.cost.seconds(num_rows + len(rows) * length) + pass_seconds * length)
        if speed > best_speed:
            best, best_speed = length, speed
    return best
