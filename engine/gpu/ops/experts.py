"""A mixture of experts on a GPU: routing, then two grouped GEMMs over the experts' weights, stacked.

Nothing is read on the host, and grids depend on the number of tokens alone, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from common.errors import UnsupportedModelError
from engine.gpu.ops.form import GpuBody
from engine.gpu.quantized import EightBitLinear
from engine.layers.expert_slots import ExpertSlots
from engine.layers.linear import Linear, LinearLayer
from engine.layers.moe import Moe
from kernels.gpu.expert_slots import choose_slots
from kernels.gpu.grouped_gemm import MAX_UNSORTED, SortedPairs, grouped_gemm, sort_pairs, sum_of_held
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


@dataclass(frozen=True, slots=True)
class Stack:
    """weight: (num_experts, out, in). scales: of its rows, float32 (num_experts, out), where it has 8 bits.

    bias: (num_experts, out) or None.
    """

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None = None


class StackedExperts:
    """Weights of a block's experts, one after the other; the experts' own become views of them.

    gate_up: of (2 inner, hidden) each. down: of (hidden, inner). Shared experts stand behind the others, and the
    block then has none: as many of the same size, that every token chooses. router: in the model's type, from which
    `Moe` may have made it float32. gate: see `grouped_gemm`.
    """

    @classmethod
    def of(cls, block: Moe) -> StackedExperts:
        """Stack a block's experts once: the runner that measures memory and the one that serves share them."""
        if block.stacked is None:
            block.stacked = cls(block)
        stacked: StackedExperts = block.stacked
        return stacked

    def __init__(self, block: Moe) -> None:
        """Raise UnsupportedModelError for experts that are neither plain nor of 8 bits."""
        self.num_shared = 0
        self.gate = (block.rule.swiglu_alpha, block.rule.swiglu_limit)
        self.router = block.router.to(block.norm.dtype)
        gate_up = [checked(expert.gate_up) for expert in block.experts.values()]
        down = [checked(expert.down) for expert in block.experts.values()]
        more_gate_up: list[Stack] = []
        more_down: list[Stack] = []
        if block.shared is not None:
            self.num_shared, rest = divmod(block.rule.shared_size, block.rule.intermediate_size)
            if rest:
                raise UnsupportedModelError("a rank has less than one shared expert: leave --expert-parallel out")
            more_gate_up = gate_up_pieces(checked(block.shared.gate_up), self.num_shared)
            more_down = down_pieces(checked(block.shared.down), self.num_shared)
            block.shared = None
        self.gate_up, self.down = stacked(gate_up, more_gate_up), stacked(down, more_down)


Stackable = Linear | EightBitLinear


def checked(layer: LinearLayer) -> Stackable:
    if not isinstance(layer, Stackable):
        raise UnsupportedModelError("experts on a GPU have 16 or 8 bits: use --quant-mode none or fp8")
    return layer


def scales_of(layer: Stackable) -> Tensor | None:
    return layer.scales if isinstance(layer, EightBitLinear) else None


def gate_up_pieces(layer: Stackable, count: int) -> list[Stack]:
    """Cut gate_up into that of `count` experts, whose outputs add up to that of all as one. Without a bias."""

    def pieces(rows: Tensor) -> list[Tensor]:
        gate, up = rows.view(2, count, -1, *rows.shape[1:])
        return list(torch.cat([gate, up], dim=1))

    scales = scales_of(layer)
    scales_of_pieces = [None] * count if scales is None else pieces(scales)
    return [Stack(*piece) for piece in zip(pieces(layer.weight), scales_of_pieces, strict=True)]


def down_pieces(layer: Stackable, count: int) -> list[Stack]:
    """Cut down into that of `count` experts, see `gate_up_pieces`."""
    scales = scales_of(layer)
    return [Stack(weight, scales) for weight in layer.weight.view(layer.weight.shape[0], count, -1).unbind(1)]


def stacked(layers: list[Stackable], more: list[Stack]) -> Stack:
    scales = [scales_of(layer) for layer in layers] + [piece.scales for piece in more]
    weights = torch.stack([*(layer.weight for layer in layers), *(piece.weight for piece in more)])
    for index, layer in enumerate(layers):
        layer.weight = weights[index]
    known = [scale for scale in scales if scale is not None]
    if known and len(known) < len(scales):
        raise UnsupportedModelError("a layer's experts must all have 8 bits, or none of them")
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return Stack(weights, torch.stack(known) if known else None, torch.stack(biases) if biases else None)


def router_of(block: Moe, experts: StackedExperts, plain_router: Gemm) -> Gemm:
    """Logits of a normed x. plain_router: the router's GEMM in x's type."""
    if not block.rule.float32_router:
        return plain_router

    def float32(x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, experts.router.t(), out_dtype=torch.float32)
        return functional.linear(x.float(), experts.router.float())

    return float32


def chooser(block: Moe, num_shared: int, held: range | None = None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Shares and slots, shared experts among them, of each token by its logits. held: see `route`; this rank's."""
    rule = block.rule
    held = held or rule.held_slots
    if block.slots is not None:
        return _chooser_of_slots(block, block.slots, num_shared, held)

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        return route(
            logits, block.num_chosen, rule.score == "softmax", rule.normalizes_weights, block.choice_bias,
            rule.weight_factor, rule.num_groups, rule.num_chosen_groups, rule.group_top, num_shared,
            held,
        )  # fmt: skip

    return choose


def _chooser_of_slots(
    block: Moe, slots: ExpertSlots, num_shared: int, held: range
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """As `chooser`, for a layer with a placement."""
    rule = block.rule

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        shares, chosen = route(
            logits, block.num_chosen, rule.score == "softmax", rule.normalizes_weights, block.choice_bias,
            rule.weight_factor, rule.num_groups, rule.num_chosen_groups, rule.group_top, num_shared,
        )  # fmt: skip
        choose_slots(chosen, slots.table, slots.counts, held)
        return shares, chosen

    return choose


def moe(block: Moe, experts: StackedExperts, plain_router: Gemm, is_summed: bool = False) -> GpuBody:
    """The block's output as partial sums, one for each of a token's experts, or their sum.

    Partial sums need all experts to be this rank's.
    """
    router, choose = router_of(block, experts, plain_router), chooser(block, experts.num_shared)

    def body(x: Tensor, step: object) -> Tensor:
        shares, chosen = choose(router(x))
        parts = outputs(experts, x, shares, chosen)
        return sum_of_held(parts, chosen) if is_summed else parts

    return body


def outputs(
    experts: StackedExperts, x: Tensor, shares: Tensor, chosen: Tensor, listed: SortedPairs | None = None
) -> Tensor:
    """Partial sums (choices, num_tokens, hidden) of each token's choices, see `grouped_gemm`.

    listed: pairs by expert, if they are known and there are many.
    """
    gate_up, down, gate = experts.gate_up, experts.down, experts.gate
    num_experts, top_k, num_pairs = gate_up.weight.shape[0], chosen.shape[1], chosen.numel()
    if num_pairs <= MAX_PAIRS:
        inside = grouped_gemv(
            x, gate_up.weight, chosen, GATE_UP_PAIRS, top_k, scales=gate_up.scales, bias=gate_up.bias, gate=gate
        )  # fmt: skip
        return grouped_gemv(
            inside, down.weight, chosen, DOWN_PAIRS, top_k, shares, scales=down.scales, bias=down.bias
        )  # fmt: skip
    load, itemsize = num_pairs / num_experts, down.weight.itemsize
    gate_up_tile = GROUPED_GATE_UP.find(pairs_per_expert=load, itemsize=itemsize)
    down_tile = GROUPED_DOWN.find(pairs_per_expert=load, itemsize=itemsize)
    assert gate_up_tile is not None and down_tile is not None, "there is a rule for any number"  # noqa: PT018
    pairs: SortedPairs | Tensor = chosen
    if is_listed(*chosen.shape):
        pairs = listed or sort_pairs(chosen, num_experts)
    inside = grouped_gemm(
        x, gate_up.weight, pairs, gate_up_tile, top_k, scales=gate_up.scales, bias=gate_up.bias, gate=gate
    )  # fmt: skip
    return grouped_gemm(inside, down.weight, pairs, down_tile, top_k, shares, down.scales, down.bias)


def is_listed(num_tokens: int, num_choices: int) -> bool:
    """Whether there are so many tokens of so many choices that their pairs are listed by expert."""
    return num_tokens > MAX_UNSORTED and num_tokens * num_choices > MAX_PAIRS


def moe_of_row(block: Moe, experts: StackedExperts, logits_of: Gemm) -> Callable[[Tensor], None]:
    """Adds the block's output to a residual (1, hidden). logits_of: the router, given the residual, not normed."""
    gate_up, down = experts.gate_up, experts.down
    top_k, choose = block.num_chosen + experts.num_shared, chooser(block, experts.num_shared)
    row = GATE_UP_ROW.find(itemsize=gate_up.weight.itemsize)
    assert row is not None, "the last rule has no bounds"

    def add(residual: Tensor) -> None:
        shares, chosen = choose(logits_of(residual))
        inside = grouped_gemv(
            residual, gate_up.weight, chosen, row, top_k, norm=block.norm, eps=block.eps,
            scales=gate_up.scales, bias=gate_up.bias, gate=experts.gate,
        )  # fmt: skip
        add_down_of_row(inside, down.weight, chosen, shares, DOWN_ROW, residual, down.scales, down.bias)

    return add
