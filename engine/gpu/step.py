"""One step on a GPU, from its launch until its sampled tokens are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine.logprobs import LogprobTensors
from engine.plan import ScheduledRow, StepResult
from engine.request_states import RequestState
from engine.sampler import NO_TOKEN


@dataclass(slots=True)
class GpuBatch:
    """The rows of one step, their requests and their rows on the device, all parallel."""

    rows: Sequence[ScheduledRow]
    requests: Sequence[RequestState]
    device_rows: Sequence[int]


@dataclass(slots=True)
class PendingLogprobs:
    """Log-probabilities on their way to the host: of which rows of the plan, and how many alternatives of each."""

    rows: Sequence[int]
    counts: Sequence[int]
    tensors: LogprobTensors


@dataclass(slots=True)
class GpuStep:
    """A step on the stream: what is known of it already, and where the rest will be."""

    found: StepResult
    waits: list[Callable[[], None]] = field(default_factory=list)
    tokens: Tensor | None = None  # on the host, valid after the waits; negative: there is none
    sampled: list[tuple[int, int, RequestState, int]] = field(default_factory=list)
    logprobs: PendingLogprobs | None = None

    def result(self) -> StepResult:
        """See PendingStep. `sampled` holds (index in tokens, row of the plan, its request, position)."""
        for wait in self.waits:
            wait()
        if self.tokens is not None:
            values = self.tokens.tolist()
            for index, row, request, position in self.sampled:
                token_id = values[index]
                if token_id < 0:
                    self.found.errors[row] = NO_TOKEN[token_id]
                else:
                    request.put_token(position, token_id)
                    self.found.token_ids[row].append(token_id)
        if self.logprobs is not None:
            pending = self.logprobs
            token_ids = [(self.found.token_ids[row] or [0])[0] for row in pending.rows]
            for row, entry in zip(pending.rows, pending.tensors.entries(token_ids, pending.counts), strict=True):
                if row not in self.found.errors:
                    self.found.logprobs[row].append(entry)
        return self.found
