"""Pools prompts' hidden states into one vector each, chunk by chunk.

    last    the hidden state of the prompt's last token
    mean    the mean of those of all its tokens, in float32
    cls     the hidden state of its first token

All use the states after the final norm; then come the layers that the model's folder has for vectors
(`engine/pooling/modules.py`). The router normalizes. A vector is returned as log-probabilities of the one token that
its request samples: as the values of the alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.plan import ScheduledRow, StepResult
from engine.pooling.modules import VectorModules
from engine.request import TokenLogprobs
from engine.request_states import RequestState


def add_vectors(
    rows: Sequence[ScheduledRow], requests: Sequence[RequestState], hidden: Tensor,
    end_of: Callable[[int], int], result: StepResult, modules: VectorModules,
) -> None:  # fmt: skip
    """Pool a step's hidden states (num_tokens, hidden_size), and add the vectors of prompts that end with the step.

    end_of: returns where a row's hidden states end.
    """
    ended: list[int] = []
    vectors: list[Tensor] = []
    for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
        end = end_of(i)
        if request.params.pooling == "mean":
            # By the row's start: a row that is run again, because another row of its step failed, counts once.
            request.pooled = request.pooled or {}
            request.pooled[row.start] = hidden[end - row.num_tokens : end].sum(dim=0, dtype=torch.float32)
        elif request.params.pooling == "cls" and not row.start:
            request.pooled = hidden[end - row.num_tokens].to(torch.float32, copy=True)
        if request.params.pooling and row.samples:
            ended.append(i)
            vectors.append(_vector(request, row, hidden[end - 1]))
    if vectors:
        found = modules.apply(torch.stack(vectors)).tolist()  # one copy from the device
        for i, values in zip(ended, found, strict=True):
            result.logprobs[i].append(TokenLogprobs(0, 0.0, 0, (), tuple(values)))


def _vector(request: RequestState, row: ScheduledRow, last: Tensor) -> Tensor:
    """Return the pooled state of a prompt after its last row. last: the last token's hidden state."""
    if request.params.pooling == "mean":
        total: Tensor = sum(request.pooled.values())
        return total / row.stop
    if request.params.pooling == "cls":
        first: Tensor = request.pooled
        return first
    return last.float()
