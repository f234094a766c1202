"""Drafts by a head on a GPU: the host queues all passes of a step's drafts and waits once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.gpu.pinning import download
from engine.gpu.steps.rows import RowTable
from engine.gpu.steps.step import mark
from engine.plan import StepResult
from engine.request_states import RequestState
from engine.runner import Sampled
from engine.speculation.draft_length import DraftLengths
from engine.speculation.from_model import Drafting, FromModel
from engine.speculation.from_tokens import most_drafts
from engine.speculation.on_gpu.draft_model import best_length, kind_of
from engine.speculation.on_gpu.head import BLOCKS, INDEX, NUM_FIELDS, POSITION, ROW, HeadGraphs
from engine.speculation.overlap import Overlap


@dataclass(slots=True)
class Followed(Drafting):
    """A request as the head follows it."""


class FromGpuHead(FromModel):
    """Proposes the drafts of a head on the model's GPU."""

    def __init__(
        self, graphs: HeadGraphs, rows: RowTable, max_model_len: int, vocab_size: int, overlap: Overlap | None,
        lengths: DraftLengths, num_tokens: int,
    ) -> None:  # fmt: skip
        """rows: of the model's runner. num_tokens: most drafts of a row. overlap: nothing is drafted while steps
        overlap, since the model's next step would run first and overwrite the residuals that the head reads.
        """
        super().__init__(lengths)
        self._graphs, self._rows, self._overlap = graphs, rows, overlap
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self._num_tokens = num_tokens
        pin = torch.cuda.is_available()
        self._fields = torch.zeros(NUM_FIELDS, rows.buckets[-1], dtype=torch.int32, pin_memory=pin)

    def propose(self, found: StepResult, sampled: Sequence[Sampled]) -> None:
        """See Proposer. Only for rows of decode steps, where a query's index is also that of its residuals."""
        if self._overlap is not None and not self._overlap.waits:
            return
        began = time.monotonic()
        rows: dict[int, tuple[RequestState, Followed, int, int]] = {}
        ends: dict[int, list[int]] = {}
        for index, row, request, _, _ in sampled:
            ends.setdefault(row, []).append(index)
            if row not in rows and found.token_ids[row] and not (request.prefill_only or request.changes_logits):
                followed = self._follow(request, len(found.token_ids[row]))
                most = min(most_drafts(request, self._num_tokens), self._max_model_len - len(request.token_ids))
                if most > 0:
                    rows[row] = request, followed, most, 0
        wanted = {
            row: (request, followed, most, ends[row][len(found.token_ids[row]) - 1])
            for row, (request, followed, most, _) in rows.items()
            if self._is_worth_drafting(followed, len(rows))
        }
        if wanted:
            self._draft(list(wanted.values()), len(rows))
        for row, (_, followed, _, _) in wanted.items():
            if followed.drafts.token_ids:
                found.drafts[row] = followed.taken()
        self._lengths.exclude(time.monotonic() - began)

    def _follow(self, request: RequestState, num_new: int) -> Followed:
        """Return the request as followed. num_new: tokens that the step has sampled."""
        followed = request.drafter
        if not isinstance(followed, Followed):
            followed = request.drafter = Followed()
        if followed.num_known == len(request.token_ids) - num_new:
            self._acceptance.learn(followed.record, request.token_ids[followed.num_known :])
        followed.begin()
        followed.num_known = len(request.token_ids)
        return followed

    def _draft(self, wanted: Sequence[tuple[RequestState, Followed, int, int]], num_rows: int) -> None:
        """Draft for requests, given the most drafts of each and the index of its last token in the step."""
        began = time.monotonic()
        count = next(size for size in self._rows.buckets if size >= len(wanted))
        fields = self._fields.numpy()
        fields[:, :count] = 0
        fields[POSITION, :count] = -1
        fields[POSITION, : len(wanted)] = [len(request.token_ids) - 2 for request, *_ in wanted]
        fields[ROW, : len(wanted)] = [self._rows.row_of(request) for request, *_ in wanted]
        fields[INDEX, : len(wanted)] = [index for *_, index in wanted]
        fields[BLOCKS, : len(wanted)] = [len(request.block_ids) // self._graphs.num_groups for request, *_ in wanted]
        length = best_length(
            [(followed.record, most) for _, followed, most, _ in wanted], num_rows, self._lengths,
            self._times.cost.seconds(len(wanted)), self._acceptance,
        )  # fmt: skip
        self._graphs.begin(count, self._fields[:, :count])
        passes = [download(self._graphs.draft(count)) for _ in range(length)]
        mark(self._graphs.device)()
        drafts = torch.stack(passes).tolist()
        for index, (_, followed, most, _) in enumerate(wanted):
            followed.probability = 1.0
            for number in range(min(length, most)):
                token_id = drafts[number][index]
                if not 0 <= token_id < self._vocab_size:
                    break
                self._add_draft_of_kind(followed, token_id, kind_of(number + 1))
        self._times.observe(len(wanted), 0, (time.monotonic() - began) / length)
