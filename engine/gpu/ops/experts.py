"""A mixture of experts on a GPU: routing, then two grouped GEMMs over the experts' weights, stacked.

Nothing is read on the host, and grids depend on the number of tokens alone, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from common.errors import UnsupportedModelError
from engine.gpu.ops.form import GpuBody
from engine.layers.linear import Linear, LinearLayer
from engine.layers.moe import Expert, Moe
from kernels.gpu.grouped_gemm import grouped_gemm, sort_pairs
from kernels.gpu.grouped_gemv import add_down_of_row, grouped_gemv
from kernels.gpu.moe_routing import route
from kernels.gpu.tuning import (
    DOWN_PAIRS,
    DOWN_ROW,
    GATE_UP_PAIRS,
    GATE_UP_ROW,
    GROUPED_DOWN,
    GROUPED_GATE_UP,
    MAX_PAIRS,
)

Gemm = Callable[[Tensor], Tensor]


class StackedExperts:
    """Weights of a block's experts, one after the other; the experts' own become views of them.

    gate_up: (num_experts, 2 inner, hidden). down: (num_experts, hidden, inner). Shared experts stand behind the
    others, which the block then has no longer: as many of the same size, that every token chooses.
    """

    def __init__(self, block: Moe) -> None:
        """Raise UnsupportedModelError for experts that are not plain."""
        self.num_shared = 0 if block.shared is None else block.rule.num_shared_experts
        gate_up = [plain(expert.gate_up) for expert in block.experts]
        down = [plain(expert.down) for expert in block.experts]
        inner = block.rule.intermediate_size
        shared_gate_up: list[Tensor] = []
        shared_down: list[Tensor] = []
        if block.shared is not None:
            shared_gate_up, shared_down = pieces(block.shared, self.num_shared, inner)
            block.shared = None
        self.gate_up = stacked(gate_up, shared_gate_up)
        self.down = stacked(down, shared_down)


def plain(layer: LinearLayer) -> Linear:
    if not isinstance(layer, Linear) or layer.bias is not None:
        raise UnsupportedModelError("quantized experts have no GPU kernels yet: use --quant-mode none")
    return layer


def pieces(shared: Expert, count: int, inner: int) -> tuple[list[Tensor], list[Tensor]]:
    """gate_up and down of `count` experts, whose outputs add up to that of all shared experts as one."""
    gate, up = plain(shared.gate_up).weight.view(2, count, inner, -1)
    return list(torch.cat([gate, up], dim=1)), list(plain(shared.down).weight.view(-1, count, inner).unbind(1))


def stacked(layers: list[Linear], more: list[Tensor]) -> Tensor:
    weights = torch.stack([*(layer.weight for layer in layers), *more])
    for index, layer in enumerate(layers):
        layer.weight = weights[index]
    return weights


def router_of(block: Moe, plain_router: Gemm) -> Gemm:
    """Logits of a normed x. plain_router: the router's GEMM in x's type."""
    if not block.rule.float32_router:
        return plain_router

    weight = block.router
    narrow = weight.to(block.norm.dtype)  # what it was before `Moe` made it float32: nothing is lost

    def float32(x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype == narrow.dtype != torch.float32:
            return torch.mm(x, narrow.t(), out_dtype=torch.float32)
        return functional.linear(x.float(), weight)

    return float32


def chooser(block: Moe, num_shared: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Shares and experts, shared ones among them, of each token by its logits."""
    rule = block.rule

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        return route(
            logits, block.num_chosen, rule.score == "softmax", rule.normalizes_weights, block.choice_bias,
            rule.weight_factor, rule.num_groups, rule.num_chosen_groups, rule.group_top, num_shared,
        )  # fmt: skip

    return choose


def moe(block: Moe, experts: StackedExperts, plain_router: Gemm) -> GpuBody:
    """The block's output as partial sums, one for each of a token's experts."""
    num_experts, top_k = experts.gate_up.shape[0], block.num_chosen + experts.num_shared
    router, choose = router_of(block, plain_router), chooser(block, experts.num_shared)

    def body(x: Tensor, step: object) -> Tensor:
        shares, chosen = choose(router(x))
        num_pairs = chosen.numel()
        if num_pairs <= MAX_PAIRS:
            inside = grouped_gemv(x, experts.gate_up, chosen, GATE_UP_PAIRS, top_k)
            return grouped_gemv(inside, experts.down, chosen, DOWN_PAIRS, top_k, shares)
        gate_up = GROUPED_GATE_UP.find(pairs_per_expert=num_pairs / num_experts)
        down = GROUPED_DOWN.find(pairs_per_expert=num_pairs / num_experts)
        assert gate_up is not None and down is not None, "the tables have a rule for any number"  # noqa: PT018
        pairs = sort_pairs(chosen, num_experts)
        inside = grouped_gemm(x, experts.gate_up, pairs, gate_up, top_k)
        return grouped_gemm(inside, experts.down, pairs, down, top_k, shares)

    return body


def moe_of_row(block: Moe, experts: StackedExperts, logits_of: Gemm) -> Callable[[Tensor], None]:
    """Adds the block's output to a residual (1, hidden). logits_of: the router, given the residual, not normed."""
    top_k, choose = block.num_chosen + experts.num_shared, chooser(block, experts.num_shared)

    def add(residual: Tensor) -> None:
        shares, chosen = choose(logits_of(residual))
        inside = grouped_gemv(
            residual, experts.gate_up, chosen, GATE_UP_ROW, top_k, norm=block.norm, eps=block.eps
        )  # fmt: skip
        add_down_of_row(inside, experts.down, chosen, shares, DOWN_ROW, residual)

    return add
