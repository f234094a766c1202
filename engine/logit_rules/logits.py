"""Logits processing: applies a request's parameters to its logits before a token is sampled.

In this order: minus infinity for tokens that are not allowed (`filters.py`), biases, penalties:

repetition: l > 0 ? l / r : l * r for every token in prompt and output;
frequency and presence: l -= f * count + p * (count > 0) over the output.

`apply_params` does this for one row of logits on any device; `logits_columns.py` for all rows of a step on the
device, from the same masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.logit_rules.filters import TokenMask, prepare_constraints
from engine.request_states import RequestState

MINUS_INFINITY = float("-inf")


def apply_rules(logits: Tensor, requests: Sequence[RequestState], positions: Sequence[int]) -> None:
    """Change rows of logits (n, vocab) in place if their requests ask for it, see `apply_params`."""
    prepare_constraints(requests, positions)
    for index, (request, position) in enumerate(zip(requests, positions, strict=True)):
        if request.params.changes_logits:
            apply_params(logits[index], request, position)


def apply_params(row: Tensor, request: RequestState, position: int) -> None:
    """Change `row` (vocab,) float32 in place for the token at `position`; all tokens before it are known."""
    params = request.params
    mask = request.token_mask
    if mask is None:
        mask = request.token_mask = TokenMask(request, row.shape[0])
    if mask.has_filters:
        mask.update(position)
        blocked = np.unpackbits(mask.blocked.view(np.uint8), count=row.shape[0], bitorder="little").view(np.bool_)
        row.masked_fill_(torch.from_numpy(blocked).to(row.device), MINUS_INFINITY)
    if params.logit_bias:
        biased = torch.tensor([token_id for token_id, _ in params.logit_bias], device=row.device)
        biases = torch.tensor([bias for _, bias in params.logit_bias], dtype=row.dtype, device=row.device)
        row.index_add_(0, biased, biases)
    known = request.token_ids[:position]
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(list(set(known)), device=row.device)
        values = row[ids]
        row[ids] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        counts = Counter(known[request.num_prompt_tokens :])
        if counts:
            ids = torch.tensor(list(counts), device=row.device)
            amounts = torch.tensor(list(counts.values()), dtype=torch.float32, device=row.device)
            row[ids] -= amounts * params.frequency_penalty + params.presence_penalty
