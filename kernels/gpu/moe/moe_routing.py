"""Routing of tokens to experts on a GPU: `engine/moe/routing.py` in one kernel.

One program per token. Scores are float32; ties go to the first expert. Shared experts, which every token takes,
follow the routed ones, so they form pairs of a token and an expert like all others. Their share is one, or the
sigmoid of a separate logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import overlaps_launches, wait_for_predecessor

NOTHING = tl.constexpr(1e-20)  # prevents division by zero where all sigmoids are zero


@triton.jit
def _within_best_groups(
    ranking, experts, NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, GROUP_TOP: tl.constexpr,
):  # fmt: skip
    """Set the ranking to minus infinity outside of the groups with the greatest sums of GROUP_TOP experts."""
    groups = tl.arange(0, GROUPS)
    is_member = experts[None, :] // (NUM_EXPERTS // NUM_GROUPS) == groups[:, None]
    left = tl.where(is_member, ranking[None, :], float("-inf"))
    sums = tl.zeros((GROUPS,), tl.float32)
    for _ in tl.static_range(GROUP_TOP):
        sums += tl.max(left, axis=1)
        left = tl.where(experts[None, :] == tl.argmax(left, axis=1)[:, None], float("-inf"), left)
    sums = tl.where(groups < NUM_GROUPS, sums, float("-inf"))
    is_open = tl.zeros((GROUPS,), tl.int32)
    for _ in tl.static_range(NUM_CHOSEN):
        best = tl.argmax(sums, axis=0)
        is_open = tl.where(groups == best, 1, is_open)
        sums = tl.where(groups == best, float("-inf"), sums)
    reach = tl.sum(tl.where(is_member, is_open[:, None], 0), axis=0)
    return tl.where(reach > 0, ranking, float("-inf"))


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, shares_ptr, chosen_ptr, factor, first_held,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, NUM_HELD: tl.constexpr, TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr, CHOICES: tl.constexpr, IS_SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORMALIZES: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr, GATES_SHARED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """EXPERTS, CHOICES, GROUPS: NUM_EXPERTS, TOP_K + NUM_SHARED and NUM_GROUPS, padded to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    is_there = experts < NUM_EXPERTS
    wait_for_predecessor(OVERLAPS)
    logits_ptr += token * (NUM_EXPERTS + GATES_SHARED)
    logits = tl.load(logits_ptr + experts, mask=is_there, other=float("-inf")).to(tl.float32)
    if IS_SOFTMAX:
        weights = tl.exp(logits - tl.max(logits, axis=0))
        scores = weights / tl.sum(weights, axis=0)
    else:
        scores = tl.sigmoid(logits)
    ranking = scores
    if HAS_BIAS:
        ranking += tl.load(bias_ptr + experts, mask=is_there, other=0.0)
    ranking = tl.where(is_there, ranking, float("-inf"))
    if NUM_GROUPS > 1:
        ranking = _within_best_groups(
            ranking, experts, NUM_EXPERTS, NUM_GROUPS, GROUPS, NUM_CHOSEN_GROUPS, GROUP_TOP
        )  # fmt: skip
    places = tl.arange(0, CHOICES)
    shares = tl.zeros((CHOICES,), tl.float32)
    chosen = tl.zeros((CHOICES,), tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.argmax(ranking, axis=0)
        shares = tl.where(places == j, tl.sum(tl.where(experts == best, scores, 0.0), axis=0), shares)
        chosen = tl.where(places == j, best.to(tl.int32), chosen)
        ranking = tl.where(experts == best, float("-inf"), ranking)
    if NORMALIZES:
        shares = shares / (tl.sum(shares, axis=0) + NOTHING)
    of_shared = 1.0
    if GATES_SHARED:
        of_shared = tl.sigmoid(tl.load(logits_ptr + NUM_EXPERTS).to(tl.float32))
    shares = tl.where(places < TOP_K, shares * factor, of_shared)
    chosen -= first_held
    chosen = tl.where((chosen >= 0) & (chosen < NUM_HELD), chosen, -1)
    chosen = tl.where(places < TOP_K, chosen, NUM_HELD + places - TOP_K)
    at = token * (TOP_K + NUM_SHARED) + places
    tl.store(shares_ptr + at, shares, mask=places < TOP_K + NUM_SHARED)
    tl.store(chosen_ptr + at, chosen, mask=places < TOP_K + NUM_SHARED)


def route(
    logits: Tensor, top_k: int, is_softmax: bool = True, normalizes: bool = False, bias: Tensor | None = None,
    factor: float = 1.0, num_groups: int = 1, num_chosen_groups: int = 1, group_top: int = 1, num_shared: int = 0,
    held: range | None = None, gates_shared: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return shares, float32, and experts, int32, of each token: (num_tokens, top_k + num_shared) each.

    logits: (num_tokens, num_experts + gates_shared), contiguous. is_softmax: otherwise scores are sigmoids.
    normalizes: a token's shares add up to one, before `factor`. bias: float32 (num_experts,), for the choice only.
    With groups, experts are chosen only from the best num_chosen_groups, by the sums of their group_top best. held:
    this rank's experts, by default all: chosen ones are numbered from its first on, others are -1. num_shared:
    experts after those held that every token takes with a share of one, or with gates_shared the sigmoid of its last
    logit.
    """
    num_tokens, num_experts = logits.shape[0], logits.shape[1] - gates_shared
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    num_places = top_k + num_shared
    held = held or range(num_experts)
    shares = torch.empty(num_tokens, num_places, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_tokens, num_places, dtype=torch.int32, device=logits.device)
    overlaps = overlaps_launches(logits)
    _route_kernel[(num_tokens,)](
        logits, logits if bias is None else bias, shares, chosen, factor, held.start,
        NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts), NUM_HELD=len(held), TOP_K=top_k,
        NUM_SHARED=num_shared,
        CHOICES=triton.next_power_of_2(num_places), IS_SOFTMAX=is_softmax, HAS_BIAS=bias is not None,
        NORMALIZES=normalizes, NUM_GROUPS=num_groups, GROUPS=triton.next_power_of_2(num_groups),
        NUM_CHOSEN_GROUPS=num_chosen_groups, GROUP_TOP=group_top, GATES_SHARED=gates_shared,
        OVERLAPS=overlaps, num_warps=1, launch_pdl=overlaps,
    )  # fmt: skip
    return shares, chosen
