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


class StackedExperts:
    """Weights of a block's experts, one after the other; the experts' own become views of them.

    gate_up: (num_experts, 2 inner, hidden). down: (num_experts, hidden, inner).
    """

    def __init__(self, block: Moe) -> None:
        """Raise UnsupportedModelError for experts that are not plain, or chosen otherwise than the kernel does."""
        rule = block.rule
        if rule.score != "softmax" or rule.num_groups > 1 or block.shared is not None or rule.weight_factor != 1.0:
            raise UnsupportedModelError("this choice of experts has no GPU kernel yet: use --device cpu")
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


def moe(block: Moe, experts: StackedExperts, router: Callable[[Tensor], Tensor]) -> GpuBody:
    """The block's output as partial sums, one for each of a token's experts. router: gives its logits."""
    num_experts, top_k = experts.gate_up.shape[0], block.num_chosen

    def body(x: Tensor, step: object) -> Tensor:
        shares, chosen = route_softmax(router(x), top_k, block.rule.normalizes_weights)
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

    return body
