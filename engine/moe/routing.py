"""Routing: how a token chooses its experts, and the weights of their outputs.

scores   softmax or sigmoid of the router's logits
choice   the experts of greatest score + bias; with groups, within those with the best sums of `group_top`
shares   the chosen experts' scores, without the bias; normalized to a sum of one if wanted; times a constant
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.moe.config import MoeConfig

NOTHING = 1e-20  # prevents division by zero where all sigmoids are zero; it changes no other sum


def choose_experts(logits: Tensor, rule: MoeConfig, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits (num_tokens, num_experts), bias float32 (num_experts,).

    Returns the weights, float32, and indices of each token's experts: (num_tokens, num_experts_per_token) each.
    """
    scores = logits.softmax(dim=-1, dtype=torch.float32) if rule.score == "softmax" else logits.float().sigmoid()
    ranking = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        ranking = within_best_groups(ranking, rule.num_groups, rule.num_chosen_groups, rule.group_top)
    chosen = ranking.topk(rule.num_experts_per_token, dim=-1).indices
    shares = scores.gather(-1, chosen)
    if rule.normalizes_weights:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + NOTHING)
    return shares * rule.weight_factor, chosen


def within_best_groups(ranking: Tensor, num_groups: int, num_chosen: int, group_top: int) -> Tensor:
    """Set the ranking (num_tokens, num_experts) to minus infinity outside of each token's best groups."""
    by_group = ranking.view(ranking.shape[0], num_groups, ranking.shape[1] // num_groups)
    best = by_group.topk(group_top, dim=-1).values.sum(dim=-1).topk(num_chosen, dim=-1).indices
    is_open = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=ranking.device).scatter_(1, best, True)
    return by_group.masked_fill(~is_open[..., None], float("-inf")).flatten(1)
