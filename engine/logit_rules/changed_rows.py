"""Rows whose logits change (masks, biases, penalties, hooks), resampled on the device after their step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.gpu.ops.rules import Vocabulary
from engine.gpu.pinning import upload
from engine.gpu.steps.device_sampler import DeviceSampler
from engine.gpu.steps.rows import DeviceState, RowChanges
from engine.gpu.steps.step import GpuBatch
from engine.logit_rules.logits_columns import MAX_CHANGED_ROWS, LogitsColumns


class ChangedRows:
    """The rules of a runner's rows, and the resampling of rows that have any."""

    def __init__(self, vocab_size: int, state: DeviceState, sampler: DeviceSampler, vocabulary: Vocabulary) -> None:
        """vocabulary: of this rank's logits."""
        self._device = state.last_tokens.device
        self._state, self._sampler, self._vocabulary = state, sampler, vocabulary
        self._columns = LogitsColumns(sampler.max_rows, vocab_size, self._device)

    def apply(self, changes: RowChanges) -> None:
        """Update the rules of rows that have another request."""
        self._columns.apply(changes)

    def sample(self, token_ids: Tensor, logits: Tensor, batch: GpuBatch, pairs: Sequence[tuple[int, int]]) -> None:
        """Resample rows of the batch, given as (index of its logits, row), and correct their tokens."""
        for first in range(0, len(pairs), MAX_CHANGED_ROWS):
            self._sample_some(token_ids, logits, batch, pairs[first : first + MAX_CHANGED_ROWS])

    def _sample_some(
        self, token_ids: Tensor, logits: Tensor, batch: GpuBatch, pairs: Sequence[tuple[int, int]]
    ) -> None:
        sources, indices = zip(*pairs, strict=True)
        requests, rows = [batch.requests[i] for i in indices], [batch.device_rows[i] for i in indices]
        positions = [batch.rows[i].stop for i in indices]
        whole, sources_there = self._vocabulary.whole(logits, sources)
        own = self._columns.changed(whole, sources_there, rows, requests, positions)
        for k, request in enumerate(requests):
            if request.hook is not None:
                request.hook(request, own[k])
        on_device, source, position = upload([rows, sources, positions], torch.int64, self._device)
        sampled = self._sampler.sample(own, on_device, position, is_whole=True)
        self._columns.count(on_device, sampled)
        token_ids[source] = sampled
        self._state.last_tokens[on_device] = sampled.clamp(min=0)
