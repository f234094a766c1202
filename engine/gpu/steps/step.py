"""One step on a GPU, from its launch until its sampled tokens are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine.plan import ScheduledRow, StepResult
from engine.request import TokenId
from engine.request_states import RequestState
from engine.sampling.logprobs import LogprobTensors
from engine.sampling.sampler import no_token_error

NO_DRAFT = -1
# Index of the token among the step's, row of the plan, its request, position, and the draft for that position.
Sampled = tuple[int, int, RequestState, int, TokenId]


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
    waits: list[Callable[[], None]] = field(default_factory=list)
    tokens: Tensor | None = None  # on the host, valid after the waits; negative: there is none
    sampled: list[Sampled] = field(default_factory=list)
    logprobs: PendingLogprobs | None = None

    def result(self) -> StepResult:
        """See PendingStep. A row's entries are in the order of positions; those behind a wrong draft are void."""
        for wait in self.waits:
            wait()
        found, values = self.found, [] if self.tokens is None else self.tokens.tolist()
        ended: set[int] = set()  # rows whose further entries are void
        for index, row, request, position, draft in self.sampled:
            if row in ended:
                continue
            token_id = values[index]
            if token_id < 0:
                ended.add(row)
                if not found.token_ids[row]:  # else the next step begins there, and fails
                    found.errors[row] = no_token_error(request, token_id)
                continue
            request.put_token(position, token_id)
            found.token_ids[row].append(token_id)
            if draft not in (NO_DRAFT, token_id):
                ended.add(row)
        if self.logprobs is not None:
            pending = self.logprobs
            token_ids = [max(values[self.sampled[k][0]], 0) for k in pending.entries]
            for k, entry in zip(pending.entries, pending.tensors.entries(token_ids, pending.counts), strict=True):
                row = self.sampled[k][1]
                if len(found.logprobs[row]) < len(found.token_ids[row]):
                    found.logprobs[row].append(entry)
        return found


def sampled_rows(batch: GpuBatch, indices: Sequence[int], sources: Sequence[int] | None = None) -> list[Sampled]:
    """Entries of rows `indices` of the batch, one each. sources: their tokens' indices; None: in this order."""
    rows, requests = batch.rows, batch.requests
    pairs = enumerate(indices) if sources is None else zip(sources, indices, strict=True)
    return [(source, i, requests[i], rows[i].stop, NO_DRAFT) for source, i in pairs]


def sampled_queries(batch: GpuBatch) -> list[Sampled]:
    """Entries of a step of decode rows with drafts: one for each query of each row."""
    found: list[Sampled] = []
    for i, (row, request) in enumerate(zip(batch.rows, batch.requests, strict=True)):
        for position, draft in enumerate((*row.draft_token_ids, NO_DRAFT), row.start + 1):
            found.append((len(found), i, request, position, draft))
    return found
