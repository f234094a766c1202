"""One step on a GPU, from its launch until its sampled tokens are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine.gpu.progress import DeviceTimer
from engine.plan import ScheduledRow, StepResult
from engine.request import TokenLogprobs
from engine.request_states import RequestState
from engine.runner import NO_DRAFT, Proposer, Sampled, settle
from engine.sampling.logprobs import LogprobTensors


@dataclass(slots=True)
class GpuBatch:
    """The rows of one step, their requests and their rows on the device, all parallel."""

    rows: Sequence[ScheduledRow]
    requests: Sequence[RequestState]
    device_rows: Sequence[int]


@dataclass(slots=True)
class PendingLogprobs:
    """Log-probabilities on their way to the host: of which entries of `sampled`, how many alternatives of each."""

    entries: Sequence[int]
    counts: Sequence[int]
    tensors: LogprobTensors


@dataclass(slots=True)
class GpuStep:
    """A step on the stream: what is known of it already, and where the rest will be."""

    found: StepResult
    proposer: Proposer
    waits: list[Callable[[], None]] = field(default_factory=list)
    tokens: Tensor | None = None  # on the host, valid after the waits; negative: there is none
    sampled: list[Sampled] = field(default_factory=list)
    logprobs: PendingLogprobs | None = None
    takes_drafts: bool = False  # whether drafts can follow
    timer: DeviceTimer | None = None

    def result(self) -> StepResult:
        for wait in self.waits:
            wait()
        values, logprobs = [] if self.tokens is None else self.tokens.tolist(), self.logprobs
        entries: Iterable[tuple[int, TokenLogprobs]] = ()
        if logprobs is not None:
            token_ids = [max(values[self.sampled[k][0]], 0) for k in logprobs.entries]
            entries = zip(logprobs.entries, logprobs.tensors.entries(token_ids, logprobs.counts), strict=True)
        settle(self.found, self.sampled, values, entries)
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
