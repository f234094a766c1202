"""One step on a GPU, from its launch until its sampled tokens are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.gpu.progress import DeviceTimer
from engine.plan import ScheduledRow, StepResult
from engine.request_states import RequestState
from engine.runner import NO_DRAFT, Proposer, Sampled, settle


@dataclass(slots=True)
class GpuBatch:
    """The rows of one step, their requests and their rows on the device, all parallel."""

    rows: Sequence[ScheduledRow]
    requests: Sequence[RequestState]
    device_rows: Sequence[int]


@dataclass(slots=True)
class GpuStep:
    """A step on the stream: what is known of it already, and where the rest will be."""

    found: StepResult
    proposer: Proposer
    waits: list[Callable[[], None]] = field(default_factory=list)
    tokens: Tensor | None = None  # on the host, valid after the waits; negative: there is none
    sampled: list[Sampled] = field(default_factory=list)
    logprobs: Any = None  # of sampled tokens, `PendingLogprobs` of `engine.logprobs`
    takes_drafts: bool = False  # whether drafts can follow
    timer: DeviceTimer | None = None

    def result(self) -> StepResult:
        for wait in self.waits:
            wait()
        values = [] if self.tokens is None else self.tokens.tolist()
        logprobs = () if self.logprobs is None else self.logprobs.entries(self.sampled, values)
        settle(self.found, self.sampled, values, logprobs)
        if self.timer is not None:
            self.found.seconds = self.timer.seconds()
        if self.takes_drafts:
            self.proposer.propose(self.found, self.sampled)
        return self.found


def sampled_rows(batch: GpuBatch, indices: Sequence[int], sources: Sequence[int] | None = None) -> list[Sampled]:
    """Entries of rows `indices` of the batch, one each. sources: their tokens' indices; None: in this order."""
    rows, requests = batch.rows, batch.requests
    pairs = enumerate(indices) if sources is None else zip(sources, indices, strict=True)
    return [(source, i, requests[i], rows[i].stop, NO_DRAFT) for source, i in pairs]
