"""Changes to one row of logits before a token is drawn: allowed ids, bad words, min_tokens, bias, penalties.

Applied in that order, as the formulas in `SamplingParams`' users' documentation read:
repetition: l > 0 ? l / r : l * r for every token in prompt and output;
frequency and presence: l -= f * count + p * (count > 0) over the output.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from engine.request_states import RequestState

MINUS_INFINITY = float("-inf")


def apply_params(row: Tensor, request: RequestState) -> None:
    """Change `row` (vocab,) float32 in place. All tokens of the request must be known."""
    params = request.params
    if params.allowed_token_ids:
        allowed = torch.tensor(params.allowed_token_ids, device=row.device)
        kept = row[allowed]
        row.fill_(MINUS_INFINITY)
        row[allowed] = kept
    forbidden = forbidden_token_ids(request)
    if forbidden:
        row[torch.tensor(forbidden, device=row.device)] = MINUS_INFINITY
    if params.logit_bias:
        biased = torch.tensor([token_id for token_id, _ in params.logit_bias], device=row.device)
        biases = torch.tensor([bias for _, bias in params.logit_bias], device=row.device)
        row.index_add_(0, biased, biases)
    if params.repetition_penalty != 1.0:
        _penalize_repetition(row, request)
    if (params.frequency_penalty or params.presence_penalty) and request.num_output_tokens:
        counts = Counter(request.output_token_ids)
        ids = torch.tensor(list(counts), device=row.device)
        amounts = torch.tensor(list(counts.values()), dtype=torch.float32, device=row.device)
        row[ids] -= amounts * params.frequency_penalty + params.presence_penalty


def forbidden_token_ids(request: RequestState) -> list[int]:
    """Ids that would complete a bad word now, and those that may not come before `min_tokens`."""
    params = request.params
    forbidden: list[int] = []
    for word in params.bad_words:
        num_before = len(word) - 1
        end = len(request.token_ids)
        if num_before <= end and request.token_ids[end - num_before :] == list(word[:-1]):
            forbidden.append(word[-1])
    if request.num_output_tokens < params.min_tokens:
        forbidden += params.stop_token_ids
        if not params.ignore_eos:
            forbidden += request.eos_token_ids
    return forbidden


def _penalize_repetition(row: Tensor, request: RequestState) -> None:
    ids = torch.tensor(list(set(request.token_ids)), device=row.device)
    values = row[ids]
    penalty = request.params.repetition_penalty
    row[ids] = torch.where(values > 0, values / penalty, values * penalty)
