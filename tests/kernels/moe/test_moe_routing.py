from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.expert_parallel.slots import ExpertSlots
from engine.moe.config import MoeConfig
from engine.moe.routing import choose_experts
from kernels.gpu.expert_parallel.expert_slots import choose_slots
from kernels.gpu.moe.moe_routing import route
from tests.kernels.helpers import HALF_DTYPE

SOFTMAX = MoeConfig(num_experts=128, num_experts_per_token=8, intermediate_size=1, normalizes_weights=False)
GROUPED = replace(SOFTMAX, num_experts=24, num_experts_per_token=3, num_groups=3, num_chosen_groups=2)
RULES = {
    "softmax": SOFTMAX,
    "normalized": replace(SOFTMAX, num_experts=12, num_experts_per_token=3, normalizes_weights=True),
    "groups by their best": replace(GROUPED, weight_factor=16.0),
    "sigmoid, bias, groups by their best two": replace(
        GROUPED, score="sigmoid", group_top=2, has_choice_bias=True, normalizes_weights=True, weight_factor=2.5
    ),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("dtype", "num_shared", "gates_shared"),
    [(torch.float32, 2, False), (HALF_DTYPE, 0, False), (HALF_DTYPE, 2, True)],
)
def test_equals_the_reference(
    rule: MoeConfig, dtype: torch.dtype, num_shared: int, gates_shared: bool, device: torch.device
) -> None:
    logits = (
        torch.stack([torch.randperm(rule.num_experts) * 0.0625 for _ in range(5)]).to(device).to(dtype)
    )  # no ties
    bias = 0.3 * torch.randn(rule.num_experts, device=device) if rule.has_choice_bias else None
    gate = torch.randn(5, 1, device=device).to(dtype)
    shares, chosen = route(
        torch.cat([logits, gate], dim=1) if gates_shared else logits,
        rule.num_experts_per_token, rule.score == "softmax", rule.normalizes_weights, bias,
        rule.weight_factor, rule.num_groups, rule.num_chosen_groups, rule.group_top, num_shared,
        gates_shared=gates_shared,
    )  # fmt: skip
    expected, experts = choose_experts(logits, rule, bias)
    top_k = rule.num_experts_per_token
    assert torch.equal(chosen[:, :top_k].long(), experts)
    torch.testing.assert_close(shares[:, :top_k], expected, rtol=3e-6, atol=0.0)
    assert chosen[:, top_k:].tolist() == [[rule.num_experts + j for j in range(num_shared)]] * 5
    of_shared = gate.float().sigmoid() if gates_shared else torch.ones(5, 1, device=device)
    torch.testing.assert_close(shares[:, top_k:], of_shared.expand(-1, num_shared), rtol=3e-6, atol=0.0)


def test_experts_are_numbered_from_the_first_held(device: torch.device) -> None:
    logits = torch.tensor([[5.0, 1.0, 4.0, 3.0, 2.0, 0.0]], device=device)
    _, chosen = route(logits, 4, held=range(2, 4), num_shared=1)
    assert chosen.tolist() == [[-1, 0, 1, -1, 2]]


def test_of_equal_logits_the_first_are_taken_and_none_twice(device: torch.device) -> None:
    shares, chosen = route(torch.zeros(2, 6, device=device), 4, normalizes=True)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2
    assert shares.tolist() == [[0.25] * 4] * 2


@pytest.mark.parametrize("held", [range(10), range(5), range(5, 10)])
def test_slots_equal_the_reference(held: range, device: torch.device) -> None:
    slots = ExpertSlots((0, 1, 2, 3, 6, 0, 2, 4, 5, 0), device)
    experts = torch.stack([torch.randperm(7)[:3] for _ in range(200)]).to(device)
    shared = torch.tensor([7, 8], device=device).expand(200, -1)
    chosen = torch.cat([experts, shared], dim=1).int()
    choose_slots(chosen, slots.table, slots.counts, held)
    expected = slots.choose(experts)
    is_held = (expected >= held.start) & (expected < held.stop)
    assert torch.equal(chosen[:, :3].long(), torch.where(is_held, expected - held.start, -1))
    assert chosen[:, 3:].tolist() == [[len(held), len(held) + 1]] * 200
