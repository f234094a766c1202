"""Log-probabilities of the unmodified logits: of a token, its rank, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.plan import ScheduledRow, StepResult
from engine.request import TokenLogprobs
from engine.request_states import RequestState

PROMPT_LOGPROB_ROWS = 64  # positions whose logits are held at once


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of n rows: value and rank (n,) of one token each, ids and values of the likeliest (n, k)."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def map(self, move: Callable[[Tensor], Tensor]) -> LogprobTensors:
        return LogprobTensors(*map(move, (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)))

    def entries(self, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One entry per row, with `num_top[i]` alternatives. token_ids: those that the tensors were computed for."""
        columns = (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return [
            TokenLogprobs(token_id, logprob, rank, tuple(ids[:count]), tuple(values[:count]))
            for token_id, count, logprob, rank, ids, values in zip(
                token_ids, num_top, *(column.tolist() for column in columns), strict=True
            )
        ]


def logprob_tensors(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """logits (n, vocab), token_ids int64 (n,), on one device, where all is computed without waiting."""
    logits = logits.float()
    chosen = logits.gather(1, token_ids[:, None])
    normalizer = logits.logsumexp(dim=1, keepdim=True)
    ranks = (logits > chosen).sum(dim=1) + 1
    top_logits, top_ids = logits.topk(num_top, dim=1)
    return LogprobTensors((chosen - normalizer)[:, 0], ranks, top_ids, top_logits - normalizer)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row of logits (rows, vocab); `num_top[i]` alternatives each."""
    if not token_ids:
        return []
    chosen = torch.tensor(token_ids, device=logits.device)
    return logprob_tensors(logits, chosen, max(num_top)).entries(token_ids, num_top)


def add_prompt_logprobs(
    rows: Sequence[ScheduledRow], requests: Sequence[RequestState], hidden: Tensor, end_of: Callable[[int], int],
    logits_of: Callable[[Tensor], Tensor], result: StepResult,
) -> None:  # fmt: skip
    """Put the log-probabilities of prompt tokens into the result: see `ModelRunner._read_hidden`."""
    for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
        if request.wants_prompt_logprobs(row):
            own = hidden[end_of(i) - row.num_tokens : end_of(i)]
            result.prompt_logprobs[i] = prompt_logprobs(row, request, own, logits_of)


def prompt_logprobs(
    row: ScheduledRow, request: RequestState, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of the prompt tokens that follow the row's. hidden: (row.num_tokens, hidden_size).

    Position p's hidden state predicts token p + 1. Only for rows that want them.
    """
    count = request.params.prompt_logprobs
    assert count is not None
    targets = request.token_ids[row.start + 1 : min(row.stop + 1, request.num_prompt_tokens)]
    found: list[TokenLogprobs] = []
    for first in range(0, len(targets), PROMPT_LOGPROB_ROWS):
        part = targets[first : first + PROMPT_LOGPROB_ROWS]
        found += token_logprobs(logits_of(hidden[first : first + len(part)]), part, [count] * len(part))
    return found
