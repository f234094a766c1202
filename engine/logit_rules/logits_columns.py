"""Rules for the logits of rows on the device: masks, biases, penalties and the token counts that these need.

A row's rules are written when a request gets the row. Then the device counts sampled tokens, so that no step waits
for the previous one; only changed masks are sent again (`engine.logit_rules.filters.TokenMask`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.gpu.pinning import upload
from engine.gpu.steps.rows import RowChanges
from engine.logit_rules.filters import TokenMask, Words, prepare_constraints
from engine.request import MAX_BIASES
from engine.request_states import RequestState
from kernels.gpu.logit_rules.process_logits import IN_PROMPT, MAX_COUNT, LogitsRules, process_logits

MAX_CHANGED_ROWS = 32  # most rows of changed logits at once, in float32


class LogitsColumns:
    """Rules of `max_rows` rows. Its workspace serves one stream."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rules = LogitsRules.empty(max_rows, vocab_size, MAX_BIASES, device)
        self._changed = torch.empty(min(max_rows, MAX_CHANGED_ROWS), vocab_size, device=device)
        self._owners: dict[int, RequestState] = {}  # of rows that have rules

    def apply(self, changes: RowChanges) -> None:
        """Update the rules of rows that have another request."""
        moved = {new: self._owners.pop(old) for old, new in changes.moved if old in self._owners}
        for old, new in changes.moved:
            if new in moved:
                for column in self._columns:
                    column[new] = column[old]
        for row, request in changes.fresh:
            self._owners.pop(row, None)
            if request.changes_logits:
                self._write(row, request)
                moved[row] = request
        self._owners |= moved

    def changed(
        self, logits: Tensor, sources: Sequence[int], rows: Sequence[int], requests: Sequence[RequestState],
        positions: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """Return rows `sources` of logits (any, vocab), changed by their requests' rules: float32 (n, vocab).

        At most MAX_CHANGED_ROWS; valid until the next call. positions: of the tokens to be sampled.
        """
        self._update_masks(rows, requests, positions)
        ruled = [row if request.changes_logits else -1 for row, request in zip(rows, requests, strict=True)]
        index = upload([sources, ruled], torch.int64, self._device)
        out = self._changed[: len(rows)]
        process_logits(logits, index[0], index[1], self._rules, out)
        return out

    def count(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count sampled tokens, int64 (n,), in the outputs of their rows, int64 (n,)."""
        token_ids = token_ids.clamp(min=0)
        counts = self._rules.counts[rows, token_ids]
        self._rules.counts[rows, token_ids] = counts + ((counts & MAX_COUNT) < MAX_COUNT)

    @property
    def _columns(self) -> tuple[Tensor, ...]:
        rules = self._rules
        return rules.blocked, rules.bias_ids, rules.biases, rules.num_biases, rules.counts, rules.penalties

    def _write(self, row: int, request: RequestState) -> None:
        params, rules = request.params, self._rules
        request.token_mask = None  # the device has no mask of this request yet
        penalties = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        rules.penalties[row] = upload(penalties, torch.float32, self._device)
        rules.num_biases[row] = len(params.logit_bias)
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            rules.bias_ids[row, : len(ids)] = upload(ids, torch.int32, self._device)
            rules.biases[row, : len(ids)] = upload(biases, torch.float32, self._device)
        if penalties != [1.0, 0.0, 0.0]:
            rules.counts[row] = upload(self._counts_of(request), torch.int16, self._device)

    def _counts_of(self, request: RequestState) -> Any:
        outputs = np.array(request.output_token_ids, dtype=np.int64)
        counts = np.bincount(outputs, minlength=self._vocab_size).clip(max=MAX_COUNT)
        counts[request.token_ids[: request.num_prompt_tokens]] |= IN_PROMPT
        return counts

    def _update_masks(self, rows: Sequence[int], requests: Sequence[RequestState], positions: Sequence[int]) -> None:
        """Send the masks that have changed; those of grammars change at every token."""
        fresh: dict[int, Words] = {}
        prepare_constraints(requests, positions)
        for row, request, position in zip(rows, requests, positions, strict=True):
            if not request.changes_logits:
                continue
            mask = request.token_mask
            if mask is None:
                mask = request.token_mask = TokenMask(request, self._vocab_size)
            if mask.update(position):
                fresh[row] = mask.blocked
        if fresh:
            words = np.stack(list(fresh.values())).view(np.int32)
            own = upload(list(fresh), torch.int64, self._device)
            self._rules.blocked[own] = upload(words, torch.int32, self._device)
