"""Adds drafts to a step: they take only what is left over when everything else in the step is planned.

So a draft never takes a token of the step, a block or a place in the batch from a request. Where nothing is left,
rows decode without drafts. Only requests that the runner has sampled for have proposals.
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
    """Adds each decoding request's drafts to its row."""

    def __init__(
        self, lengths: DraftLengths, max_decode_tokens: int | None = None, overlap: Overlap | None = None
    ) -> None:
        """max_decode_tokens: most tokens of a step, drafts included, on a runner with kernels for decode rows. There
        only steps without prompts have drafts, and only rows whose logits no rule changes. None: no such limits.
        overlap: for a runner that can run steps while the next ones are planned; None: every step waits for the
        previous one.
        """
        self._lengths, self._overlap = lengths, overlap
        self._has_drafts = False  # in the step planned last
        self._max_decode_tokens = max_decode_tokens
        self.num_rows = 0  # rows with drafts since the start
        self.num_drafts = 0  # tokens
        self._accepted: list[int] = []  # by draft position

    @property
    def num_accepted(self) -> int:
        return sum(self._accepted)

    def observe(self, size: StepSize, seconds: float) -> None:
        """Learn from the duration of a step."""
        (self._overlap or self._lengths).observe(size, seconds)

    @property
    def needs_known_tokens(self) -> bool:
        """Whether the next step may be planned only once the last one's tokens are known: drafts change how many
        these are, and new ones may follow.
        """
        return self._overlap is None or self._overlap.waits or self._has_drafts

    def settle(self, request: Request, row: ScheduledRow, num_sampled: int, kv: KVManager) -> None:
        """Count a row's drafts, and take back the computed tokens of those that were not accepted.

        Later steps overwrite their KV. num_sampled: the accepted drafts, plus the token after them.
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

    def add_drafts(self, step: ScheduledStep, kv: KVManager, num_spare_tokens: int, num_kept_blocks: int) -> None:
        """Add drafts to the rows of `step`.

        num_spare_tokens: tokens that the step may still compute. num_kept_blocks: available blocks of the pool that
        drafts must not take.
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
                request.max_output - len(request.output_token_ids) - 1,  # one token follows the last draft
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
        """Let `overlap` decide by all drafts, also of requests with pending tokens."""
        size = StepSize.of(list(step.rows.values()))
        acceptance = [
            request.drafts.acceptance
            for request in step.rows
            if request.drafts is not None and request.drafts.token_ids and not request.params.changes_logits
        ]
        overlap.decide(acceptance, size.num_decode_tokens, max(num_spare_tokens, 0), size.context)

    def _chosen(self, step: ScheduledStep, num_spare_tokens: int) -> list[tuple[Request, ScheduledRow, list[int]]]:
        """Return the rows that get drafts, with the most drafts of each."""
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
    """Whether the row computes an output token, and all tokens before the next one are known."""
    return _decodes(request, row) and not request.num_pending_tokens
