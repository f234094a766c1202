"""Drafts in a step: they take what the step has left over, when everything else in it is planned.

So a draft never takes a token of the step, a block or a place in the batch from anybody. Where nothing is left, rows
decode as they would without. What a runner has proposed is known for requests that it has sampled for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plan import ScheduledRow, StepSize
from engine.request import Drafts, Request, RequestStatus
from engine.scheduled_step import ScheduledStep
from engine.speculation.draft_length import DraftLengths
from engine.speculation.overlap import Overlap
from engine.wings import Figures

if TYPE_CHECKING:
    from engine.kv.manager import KVManager


class Speculation:
    """Puts the drafts of each decoding request into its row."""

    def __init__(
        self, lengths: DraftLengths, max_decode_tokens: int | None = None, overlap: Overlap | None = None
    ) -> None:
        """max_decode_tokens: of a step, drafts included, on a runner with kernels for decode rows: there they are in
        steps without prompts alone, and in rows whose logits no rule changes. None: no such bounds. overlap: of a
        runner that can run steps while the next ones are planned; None: all steps wait for those before.
        """
        self._lengths, self._overlap = lengths, overlap
        self._has_drafts = False  # the last step that was planned
        self._max_decode_tokens = max_decode_tokens
        self.num_rows = 0  # with drafts, since the start
        self.num_drafts = 0  # tokens
        self._accepted: list[int] = []  # by position after the last known token

    @property
    def num_accepted(self) -> int:
        return sum(self._accepted)

    def observe(self, size: StepSize, seconds: float) -> None:
        """Learn how long a step took."""
        (self._overlap or self._lengths).observe(size, seconds)

    @property
    def needs_known_tokens(self) -> bool:
        """Whether the next step is planned when the tokens of the last one are known: its drafts say how many these
        are, and others may follow.
        """
        return self._overlap is None or self._overlap.waits or self._has_drafts

    def settle(self, request: Request, row: ScheduledRow, num_sampled: int, kv: KVManager) -> None:
        """Count a row's drafts, and take back what the scheduler has counted as computed for those not accepted.

        What they wrote is written again. num_sampled: one for each that was accepted, and the one after those.
        """
        num_drafts, num_accepted = len(row.draft_token_ids), num_sampled - 1
        self._count(num_drafts, num_accepted)
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens = row.start + num_sampled
            kv.publish(request)  # blocks that accepted drafts have filled

    def _count(self, num_drafts: int, num_accepted: int) -> None:
        self.num_rows += 1
        self.num_drafts += num_drafts
        self._accepted += [0] * (num_accepted - len(self._accepted))
        for position in range(num_accepted):
            self._accepted[position] += 1
        if self._overlap is not None:
            self._overlap.count(num_accepted)

    def figures(self) -> Figures:
        """See Counting."""
        return {
            "vllm:spec_decode_num_drafts": [self.num_rows],
            "vllm:spec_decode_num_draft_tokens": [self.num_drafts],
            "vllm:spec_decode_num_accepted_tokens": [self.num_accepted],
            "vllm:spec_decode_num_accepted_tokens_per_pos": list(self._accepted),
        }

    def add_drafts(
        self, step: ScheduledStep, kv: KVManager, num_spare_tokens: int, num_kept_blocks: int, max_model_len: int
    ) -> None:
        """Extend the rows of `step`.

        num_spare_tokens: what the step may still compute. num_kept_blocks: of the pool's available ones, not for
        drafts.
        """
        self._has_drafts = False
        max_decode_tokens = self._max_decode_tokens
        if max_decode_tokens is not None:
            if not all(_decodes(request, row) for request, row in step.rows.items()):
                return
            num_spare_tokens = min(num_spare_tokens, max_decode_tokens - len(step.rows))
            if self._overlap is not None and step.rows:
                self._decide(self._overlap, step, num_spare_tokens)
        num_spare_blocks, count = kv.pool.num_available - num_kept_blocks, kv.blocks_per_position
        for request, row, drafts in self._chosen(step, num_spare_tokens):
            num_known = request.num_known_tokens
            most = min(
                num_spare_tokens,
                max_model_len - num_known - 1,  # the token after the last draft needs its place too
                request.params.max_tokens - len(request.output_token_ids) - 1,
                (len(request.block_ids) + max(num_spare_blocks, 0)) // count * kv.block_size - num_known,
            )
            if most <= 0:
                continue
            drafts = drafts[:most]
            num_blocks = len(request.block_ids)
            grown = kv.grow(request, num_known + len(drafts))
            assert grown, "there is room for `most`"
            num_spare_blocks -= len(request.block_ids) - num_blocks
            num_spare_tokens -= len(drafts)
            row.num_tokens += len(drafts)
            row.draft_token_ids = tuple(drafts)
            self._has_drafts = True

    def _decide(self, overlap: Overlap, step: ScheduledStep, num_spare_tokens: int) -> None:
        """Let `overlap` choose by the drafts that requests have, also of tokens that are pending."""
        size = StepSize.of(list(step.rows.values()))
        acceptance = [
            request.drafts.acceptance
            for request in step.rows
            if request.drafts is not None and request.drafts.token_ids and not request.params.changes_logits
        ]
        overlap.decide(acceptance, size.num_decode_tokens, max(num_spare_tokens, 0), size.context)

    def _chosen(self, step: ScheduledStep, num_spare_tokens: int) -> list[tuple[Request, ScheduledRow, list[int]]]:
        """The rows that get drafts, and which ones at most."""
        found: list[tuple[Request, ScheduledRow, Drafts]] = []
        for request, row in step.rows.items():
            drafts = request.drafts
            if drafts is None or not drafts.token_ids or not _can_have_drafts(request, row):
                continue
            if self._max_decode_tokens is None or not request.params.changes_logits:
                found.append((request, row, drafts))
        if not found or num_spare_tokens <= 0:
            return []
        size = StepSize.of(list(step.rows.values()))
        acceptance = [drafts.acceptance for _, _, drafts in found]
        lengths = self._lengths.choose(acceptance, size.num_decode_tokens, num_spare_tokens, size.context)
        return [
            (request, row, drafts.token_ids[:length])
            for (request, row, drafts), length in zip(found, lengths, strict=True)
            if length
        ]


def _decodes(request: Request, row: ScheduledRow) -> bool:
    """Whether the row computes an output token."""
    return row.num_tokens == 1 and row.samples and row.start >= len(request.prompt_token_ids)


def _can_have_drafts(request: Request, row: ScheduledRow) -> bool:
    """Whether it does, and all tokens before the next one are known."""
    return _decodes(request, row) and not request.num_pending_tokens
