"""Choices of experts: those of transformers' routers, and at what they can go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from engine.moe.config import MoeConfig
from engine.moe.routing import choose_experts

NUM_TOKENS, NUM_EXPERTS, HIDDEN = 64, 32, 32


@pytest.mark.slow
@pytest.mark.parametrize(("score", "normalizes"), [("softmax", False), ("sigmoid", False), ("sigmoid", True)])
@pytest.mark.parametrize(("num_groups", "num_chosen_groups"), [(1, 1), (4, 1), (8, 3), (16, 16)])
def test_choices_equal_transformers(score: Any, num_groups: int, num_chosen_groups: int, normalizes: bool) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN, "n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 6, "n_group": num_groups,
        "topk_group": num_chosen_groups, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    torch.manual_seed(num_groups)
    bias = torch.randn(NUM_EXPERTS) / 4 if score == "sigmoid" else None
    router: Any
    if bias is None:
        router = DeepseekV2TopkRouter(DeepseekV2Config(**sizes, topk_method="group_limited_greedy"))
    else:
        router = DeepseekV3TopkRouter(DeepseekV3Config(**sizes, norm_topk_prob=normalizes))
        router.e_score_correction_bias.copy_(bias)
    rule = MoeConfig(
        NUM_EXPERTS, 6, 0, normalizes, score=score, num_groups=num_groups, num_chosen_groups=num_chosen_groups,
        group_top=1 if score == "softmax" else 2, weight_factor=2.5,
    )  # fmt: skip
    x = torch.randn(NUM_TOKENS, HIDDEN)
    with torch.no_grad():
        router.weight.normal_(0.0, 0.3)
        _, expected_shares, expected = router(x)
        shares, chosen = choose_experts(functional.linear(x, router.weight), rule, bias)
    by_expert = torch.zeros(2, NUM_TOKENS, NUM_EXPERTS)
    by_expert[0].scatter_(1, expected, expected_shares)
    by_expert[1].scatter_(1, chosen, shares)
    torch.testing.assert_close(by_expert[1], by_expert[0])
    assert int((by_expert[1] > 0).sum()) == 6 * NUM_TOKENS


def test_a_bias_changes_the_choice_and_no_share() -> None:
    logits, bias = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([5.0, 0.0, 0.0])
    shares, chosen = choose_experts(logits, MoeConfig(3, 1, 0, normalizes_weights=False, score="sigmoid"), bias)
    assert chosen.tolist() == [[0]]
    assert shares.item() == 0.5


def test_scores_of_zero_are_shares_of_zero() -> None:
    shares, _ = choose_experts(torch.full((1, 4), -200.0), MoeConfig(4, 2, 0, score="sigmoid"))
    assert shares.tolist() == [[0.0, 0.0]]
