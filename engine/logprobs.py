"""Log-probabilities of the unmodified logits: of the chosen token, its rank, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import TokenLogprobs


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
