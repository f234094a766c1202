"""Log-probabilities of the unmodified logits: of a token, its rank, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.plan import ScheduledRow
from engine.request import TokenLogprobs
from engine.request_states import RequestState

PROMPT_LOGPROB_ROWS = 64  # positions whose logits are held at once


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row of logits (rows, vocab); `num_top[i]` alternatives each."""
    if not token_ids:
        return []
    logits = logits.float()
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen_logits = logits.gather(1, chosen)
    normalizer = logits.logsumexp(dim=1, keepdim=True)
    ranks = (logits > chosen_logits).sum(dim=1).add_(1).tolist()
    logprobs = (chosen_logits - normalizer)[:, 0].tolist()
    most = max(num_top)
    top_ids: list[list[int]] = [[] for _ in token_ids]
    top_logprobs: list[list[float]] = top_ids  # type: ignore[assignment]
    if most:
        top_logits, ids = logits.topk(most, dim=1)
        top_ids, top_logprobs = ids.tolist(), (top_logits - normalizer).tolist()
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(ids[:count]), tuple(values[:count]))
        for token_id, logprob, rank, ids, values, count in zip(
            token_ids, logprobs, ranks, top_ids, top_logprobs, num_top, strict=True
        )
    ]


def wants_prompt_logprobs(row: ScheduledRow, request: RequestState) -> bool:
    """Whether the row's hidden states predict prompt tokens whose log-probabilities were asked for."""
    return request.params.prompt_logprobs is not None and row.start + 1 < request.num_prompt_tokens


def prompt_logprobs(
    row: ScheduledRow, request: RequestState, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> list[TokenLogprobs]:
    """Return those of the prompt tokens that follow the row's. hidden: (row.num_tokens, hidden_size).

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
