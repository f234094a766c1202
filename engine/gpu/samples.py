"""From a step's logits to its tokens: sampled on the device and read later, or on the host for rows that need it.

Rows whose logits change (penalties, bias, allowed ids, hooks) are sampled by `engine.sampler`, which waits for the
step; all others stay on the device, and so do the log-probabilities that they ask for, until the step's result is
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.gpu.draw import DeviceSampler
from engine.gpu.inputs import download, upload
from engine.gpu.progress import mark
from engine.gpu.rows import RowChanges
from engine.gpu.state import DeviceState
from engine.gpu.step import GpuBatch, GpuStep, PendingLogprobs
from engine.logprobs import logprob_tensors
from engine.request import RequestId
from engine.sampler import LogitsHook, Sampler


class StepSamples:
    """Both samplers of one runner, and the pinned memory that tokens come back through."""

    def __init__(self, state: DeviceState, max_rows: int, vocab_size: int, num_buffers: int) -> None:
        """num_buffers: more than steps in flight."""
        self.hooks: dict[RequestId, LogitsHook] = {}
        self.on_device = DeviceSampler(max_rows, vocab_size, state.last_tokens.device)
        self._state = state
        self._device = state.last_tokens.device
        self._on_host = Sampler()
        pin = self._device.type == "cuda"
        self._tokens = [torch.zeros(max_rows, dtype=torch.int64, pin_memory=pin) for _ in range(num_buffers)]

    def apply(self, changes: RowChanges) -> None:
        """Bring rows that changed their owner up to date."""
        self.on_device.apply(changes)

    def stay_on_device(self, batch: GpuBatch) -> bool:
        """Whether no row of the batch asks for more than its token."""
        hooks = self.hooks
        return not any(
            request.changes_logits or request.wants_logprobs or request.request_id in hooks
            for request in batch.requests
        )

    def sample(self, logits: Tensor, batch: GpuBatch, indices: Sequence[int], turn: int, step: GpuStep) -> None:
        """Sample for rows `indices` of the batch from as many logits, and put the tokens into the device's state."""
        rows = upload([batch.device_rows[i] for i in indices], torch.int64, self._device)
        lengths = upload([batch.rows[i].stop for i in indices], torch.int64, self._device)
        token_ids = self.on_device.draw(logits, rows, lengths)
        self._state.last_tokens[rows] = token_ids.clamp(min=0)
        self.take(token_ids, logits, range(len(indices)), batch, indices, turn, step)

    def take(
        self, token_ids: Tensor, logits: Tensor | None, sources: Iterable[int], batch: GpuBatch,
        indices: Iterable[int], turn: int, step: GpuStep,
    ) -> None:  # fmt: skip
        """Give the step its tokens: row `indices[k]` has `token_ids[sources[k]]`, sampled from `logits[sources[k]]`.

        They are in the device's state already. logits: None when no row needs them.
        """
        requests, hooks = batch.requests, self.hooks
        on_host: list[tuple[int, int]] = []
        asking: list[int] = []
        for source, i in zip(sources, indices, strict=True):
            request = requests[i]
            if request.changes_logits or request.request_id in hooks:
                on_host.append((source, i))
                continue
            if request.wants_logprobs:
                asking.append(len(step.sampled))
            step.sampled.append((source, i, request, batch.rows[i].stop))
        if asking and logits is not None:
            step.logprobs = self._pending_logprobs(token_ids, logits, asking, step)
        if on_host and logits is not None:
            self._sample_on_host(logits, batch, on_host, step)
        if step.sampled:
            step.tokens = self._tokens[turn]
            step.tokens[: token_ids.shape[0]].copy_(token_ids, non_blocking=True)
            step.waits.append(mark(self._device))

    def _pending_logprobs(
        self, token_ids: Tensor, logits: Tensor, asking: Sequence[int], step: GpuStep
    ) -> PendingLogprobs:
        """Compute what the entries `asking` of `step.sampled` want, behind the step."""
        own = upload([step.sampled[k][0] for k in asking], torch.int64, self._device)
        counts = [step.sampled[k][2].params.logprobs or 0 for k in asking]
        tensors = logprob_tensors(logits[own], token_ids[own].clamp(min=0), max(counts))
        return PendingLogprobs([step.sampled[k][1] for k in asking], counts, tensors.map(download))

    def _sample_on_host(
        self, logits: Tensor, batch: GpuBatch, pairs: Sequence[tuple[int, int]], step: GpuStep
    ) -> None:
        """Let the host's sampler choose, and put its tokens where the next step finds them."""
        indices = [i for _, i in pairs]
        requests, positions = [batch.requests[i] for i in indices], [batch.rows[i].stop for i in indices]
        own = logits[upload([source for source, _ in pairs], torch.int64, self._device)]
        sampled = self._on_host.sample(own, requests, positions, self.hooks)
        tokens = upload([max(token_id, 0) for token_id in sampled.token_ids], torch.int64, self._device)
        rows = upload([batch.device_rows[i] for i in indices], torch.int64, self._device)
        self._state.last_tokens[rows] = tokens
        for k, i in enumerate(indices):
            if k in sampled.errors:
                step.found.errors[i] = sampled.errors[k]
                continue
            requests[k].put_token(positions[k], sampled.token_ids[k])
            step.found.token_ids[i].append(sampled.token_ids[k])
            entry = sampled.logprobs[k]
            if entry is not None:
                step.found.logprobs[i].append(entry)
