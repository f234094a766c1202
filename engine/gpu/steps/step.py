"""One step on a GPU, from its launch until the host reads its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.engine import DeviceLostError
from engine.plan import ScheduledRow, StepResult
from engine.request_states import RequestState
from engine.runner import NO_DRAFT, Proposer, Sampled, settle


@dataclass(slots=True)
class GpuBatch:
    """The rows of one step, with the request and the device row of each."""

    rows: Sequence[ScheduledRow]
    requests: Sequence[RequestState]
    device_rows: Sequence[int]


class DeviceTimer:
    """Measures, on the device, the time of the work queued on the current stream until `stop`. Never waits."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._began.record()

    def stop(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        """Wait for the work, and return its time."""
        self._ended.synchronize()
        milliseconds: float = self._began.elapsed_time(self._ended)
        return milliseconds / 1e3


@dataclass(slots=True)
class GpuStep:
    """A queued step: the results that are known, and where the others will be."""

    found: StepResult
    proposer: Proposer
    turn: int = 0  # of its pinned buffers
    waits: list[Callable[[], None]] = field(default_factory=list)
    tokens: Tensor | None = None  # on the host, valid after the waits; negative for padding
    sampled: list[Sampled] = field(default_factory=list)
    logprobs: Any = None  # of sampled tokens, `PendingLogprobs` of `engine.logprobs`
    takes_drafts: bool = False  # whether drafts may follow
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
    """Return an entry for each of the batch rows `indices`. sources: indices of their tokens; None: 0, 1, 2, ..."""
    rows, requests = batch.rows, batch.requests
    pairs = enumerate(indices) if sources is None else zip(sources, indices, strict=True)
    return [(source, i, requests[i], rows[i].stop, NO_DRAFT) for source, i in pairs]


def mark(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for all work queued on the current stream until now."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def check_alive(device: torch.device) -> None:
    """Check the device after a failure. Raises DeviceLostError if it does not work any more."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError("the GPU does not work any more") from error
