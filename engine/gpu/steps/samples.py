"""Samples a step's tokens on the device; the host reads them when it needs the step's result.

A graph samples all rows from unchanged logits. Rows with penalties, bias or a grammar are then sampled again
(`engine/logit_rules`), and log-probabilities are computed for the rows that ask for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.wings import has_wing
from engine.gpu.ops.rules import WHOLE_VOCABULARY, Vocabulary
from engine.gpu.pinning import upload
from engine.gpu.steps.device_sampler import DeviceSampler
from engine.gpu.steps.rows import DeviceState, RowChanges
from engine.gpu.steps.step import GpuBatch, GpuStep, mark, sampled_rows
from engine.runner import Sampled

HAS_RULES = has_wing("engine.logit_rules")
if HAS_RULES:
    from engine.logit_rules.changed_rows import ChangedRows
HAS_LOGPROBS = has_wing("engine.logprobs")
if HAS_LOGPROBS:
    from engine.logprobs.on_gpu import pending_logprobs


class StepSamples:
    """The sampling state of a runner's rows, and the pinned memory that tokens are downloaded to."""

    def __init__(
        self,
        state: DeviceState,
        max_rows: int,
        vocab_size: int,
        num_buffers: int,
        vocabulary: Vocabulary = WHOLE_VOCABULARY,
    ) -> None:
        """num_buffers: pinned buffers, more than steps in flight. vocabulary: this rank's part."""
        self.on_device = DeviceSampler(max_rows, vocab_size, state.last_tokens.device, vocabulary)
        self._vocabulary = vocabulary
        self.state = state
        self._device = state.last_tokens.device
        self._changed = ChangedRows(vocab_size, state, self.on_device, vocabulary) if HAS_RULES else None
        pin = self._device.type == "cuda"
        self._tokens = [torch.zeros(max_rows, dtype=torch.int64, pin_memory=pin) for _ in range(num_buffers)]

    def apply(self, changes: RowChanges) -> None:
        """Write the sampling parameters of rows that belong to another request now."""
        self.on_device.apply(changes)
        if self._changed is not None:
            self._changed.apply(changes)

    def sample(self, logits: Tensor, batch: GpuBatch, indices: Sequence[int], step: GpuStep) -> Tensor:
        """Sample a token for each of the batch rows `indices`, and store it in the device's state.

        logits: (n, vocab). Returns the tokens, int64 (n,).
        """
        rows = upload([batch.device_rows[i] for i in indices], torch.int64, self._device)
        lengths = upload([batch.rows[i].stop for i in indices], torch.int64, self._device)
        token_ids = self.on_device.sample(logits, rows, lengths)
        self.state.last_tokens[rows] = token_ids.clamp(min=0)
        self.take(token_ids, logits, batch, sampled_rows(batch, indices), step)
        return token_ids

    def take(self, token_ids: Tensor, logits: Tensor, batch: GpuBatch, sampled: list[Sampled], step: GpuStep) -> None:
        """Start the download of a step's tokens: `token_ids[k]` and `logits[k]` belong to the entry with index k."""
        step.sampled = sampled
        changed: list[tuple[int, int]] = []
        asking: list[int] = []
        for k, (source, i, request, _, _) in enumerate(sampled):
            if request.changes_logits:
                changed.append((source, i))
            if request.wants_logprobs:
                asking.append(k)
        if changed and self._changed is not None:  # else they are of a trial
            self._changed.sample(token_ids, logits, batch, changed)
        if asking and HAS_LOGPROBS:  # likewise
            step.logprobs = pending_logprobs(token_ids, logits, sampled, asking, self._vocabulary)
        if sampled:
            step.tokens = self._tokens[step.turn]
            step.tokens[: token_ids.shape[0]].copy_(token_ids, non_blocking=True)
            step.waits.append(mark(self._device))
