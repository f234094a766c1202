"""Which experts a token takes, on a GPU: the k likeliest of softmax(logits), and their shares.

One program per token. Probabilities are float32; of equal ones the first is taken. Reference: `Moe.route`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import overlaps_launches, wait_for_predecessor


@triton.jit
def _route_kernel(
    logits_ptr, shares_ptr, chosen_ptr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    CHOICES: tl.constexpr, NORMALIZES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """EXPERTS, CHOICES: NUM_EXPERTS and TOP_K, padded to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    is_there = experts < NUM_EXPERTS
    wait_for_predecessor(OVERLAPS)
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + experts, mask=is_there, other=float("-inf")).to(tl.float32)
    weights = tl.exp(logits - tl.max(logits, axis=0))
    left = weights / tl.sum(weights, axis=0)
    places = tl.arange(0, CHOICES)
    shares = tl.zeros((CHOICES,), tl.float32)
    chosen = tl.zeros((CHOICES,), tl.int32)
    left = tl.where(is_there, left, -1.0)
    for j in tl.static_range(TOP_K):
        best = tl.argmax(left, axis=0)
        shares = tl.where(places == j, tl.max(left, axis=0), shares)
        chosen = tl.where(places == j, best.to(tl.int32), chosen)
        left = tl.where(experts == best, -1.0, left)
    if NORMALIZES:
        shares = shares / tl.sum(shares, axis=0)
    tl.store(shares_ptr + token * TOP_K + places, shares, mask=places < TOP_K)
    tl.store(chosen_ptr + token * TOP_K + places, chosen, mask=places < TOP_K)


def route_softmax(logits: Tensor, top_k: int, normalizes: bool) -> tuple[Tensor, Tensor]:
    """logits (num_tokens, num_experts), contiguous -> shares float32 and experts int32, (num_tokens, top_k) each.

    normalizes: the shares of a token add up to one.
    """
    num_tokens, num_experts = logits.shape
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    shares = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    overlaps = overlaps_launches(logits)
    _route_kernel[(num_tokens,)](
        logits, shares, chosen, NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts), TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k), NORMALIZES=normalizes, OVERLAPS=overlaps, num_warps=1,
        launch_pdl=overlaps,
    )  # fmt: skip
    return shares, chosen
