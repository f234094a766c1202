"""A mixture of experts on a GPU: routing, then two grouped GEMMs over the experts' weights, stacked.

Nothing is read on the host, and grids depend on the number of tokens alone, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import UnsupportedModelError
from engine.gpu.ops.form import GpuBody
from engine.layers.linear import Linear, LinearLayer
from engine.layers.moe import Moe
from kernels.gpu.grouped_gemm import grouped_gemm, grouped_gemv, sort_pairs
from kernels.gpu.moe_routing import route_softmax
from kernels.gpu.tuning import GROUPED, PAIR

Gemm = Callable[[Tensor], Tensor]


class StackedExperts:
    """Weights of a block's experts, one after the other; the experts' own become views of them.

    gate_up: (num_experts, 2 inner, hidden). down: (num_experts, hidden, inner).
    """

    def __init__(self, block: Moe) -> None:
        """Raise UnsupportedModelError for experts that are not plain."""
        self.gate_up = _stacked([expert.gate_up for expert in block.experts])
        self.down = _stacked([expert.down for expert in block.experts])


def _stacked(layers: list[LinearLayer]) -> Tensor:
    plain = [layer for layer in layers if isinstance(layer, Linear) and layer.bias is None]
    if len(plain) < len(layers):
        raise UnsupportedModelError("quantized experts have no GPU kernels yet: use --quant-mode none")
    weights = torch.stack([layer.weight for layer in plain])
    for index, layer in enumerate(plain):
        layer.weight = weights[index]
    return weights


def moe(block: Moe, experts: StackedExperts, router: Gemm, shared: Gemm | None) -> GpuBody:
    """The block's output as partial sums: one for each of a token's experts, and one for the shared ones."""
    num_experts, top_k, rule = experts.gate_up.shape[0], block.num_chosen, block.rule
    is_plain = rule.score == "softmax" and rule.num_groups == 1 and rule.weight_factor == 1.0
    is_plain = is_plain and not (rule.has_choice_bias or rule.float32_router)

    def route(x: Tensor) -> tuple[Tensor, Tensor]:
        if is_plain:
            return route_softmax(router(x), top_k, rule.normalizes_weights)
        shares, chosen = block.route(x)
        return shares.contiguous(), chosen.to(torch.int32).contiguous()

    def chosen_experts(x: Tensor) -> Tensor:
        shares, chosen = route(x)
        num_pairs = chosen.numel()
        row = PAIR.find(pairs=num_pairs)
        if row is not None:
            inside = grouped_gemv(x, experts.gate_up, chosen, row, top_k)
            return grouped_gemv(inside, experts.down, chosen, row, top_k, shares)
        tile = GROUPED.find(pairs_per_expert=num_pairs / num_experts)
        assert tile is not None, "the table has a rule for any number"
        pairs = sort_pairs(chosen, num_experts)
        inside = grouped_gemm(x, experts.gate_up, pairs, tile, top_k)
        return grouped_gemm(inside, experts.down, pairs, tile, top_k, shares)

    if shared is None:
        return lambda x, step: chosen_experts(x)
    return lambda x, step: torch.cat([chosen_experts(x), shared(x)[None]])
