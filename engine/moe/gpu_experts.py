"""A mixture of experts on a GPU: routing, then two grouped GEMMs over the experts' weights, stacked.

Nothing is read on the host, and grids depend on the number of tokens alone, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from triton import next_power_of_2

from common.errors import UnsupportedModelError
from engine.gpu.ops.pending import Partials
from engine.gpu.ops.rules import GpuStep
from engine.layers.linear import Linear
from engine.moe.moe import Moe
from engine.quantization.gpu_linears import W8A16, dequantized
from kernels.gpu.gemm.split_k import SplitKWorkspace
from kernels.gpu.launching.launch_configs import GemvConfig, Table, TileConfig, found
from kernels.gpu.launching.tuning import (
    DOWN_PAIRS,
    DOWN_ROW,
    E4M3_DOWN,
    E4M3_GATE_UP,
    GATE_UP_PAIRS,
    GATE_UP_ROW,
    GROUPED_DOWN,
    GROUPED_GATE_UP,
    MAX_PAIRS,
)
from kernels.gpu.moe.expert_formats import WORDS, bytes_of, columns_of, fits
from kernels.gpu.moe.expert_pairs import SortedPairs, sort_pairs
from kernels.gpu.moe.grouped_gemm import MAX_UNSORTED, grouped_gemm, sum_of_held
from kernels.gpu.moe.grouped_gemv import add_down_of_row, grouped_gemv
from kernels.gpu.moe.moe_routing import route
from kernels.gpu.quantization.quantize import quantize_many_rows, quantize_rows
from kernels.quantization.quantized_gemm import FP8_DTYPE
from kernels.quantization.w4a16_gemm import pack_words, unpack_words

Gemm = Callable[[Tensor], Tensor]
Choose = Callable[[Tensor, GpuStep | None], tuple[Tensor, Tensor]]  # without a step nothing is counted


@dataclass(frozen=True, slots=True)
class Stack:
    """Weight and scales of a layer, or of all experts, (num_experts, ...), see `kernels/gpu/moe/expert_formats.py`.

    bias: (out,) or (num_experts, out), or None.
    """

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None = None

    @property
    def itemsize(self) -> float:
        return bytes_of(self.weight)

    @property
    def multiplies_e4m3(self) -> bool:
        """Whether tensor cores may take it as it is stored, beside an x of the same type."""
        return self.weight.dtype == FP8_DTYPE and self.scales is not None and self.scales.dim() == 2


class StackedExperts:
    """Weights of a block's experts, one after the other; the experts' own become views of them.

    gate_up: of (2 inner, hidden) each. down: of (hidden, inner). Shared experts stand behind the others, and the
    block then has none: as many of the same size, that every token chooses. router: in the model's type, from which
    `Moe` may have made it float32; the shared experts' gate is its last row. gate: see `grouped_gemm`.
    """

    def __init__(self, block: Moe) -> None:
        """Raise UnsupportedModelError for experts of several formats."""
        self.num_shared = 0
        self.gate = (block.rule.swiglu_alpha, block.rule.swiglu_limit)
        self.router = block.router.to(block.norm.dtype)
        if block.shared_gate is not None:
            self.router = torch.cat([self.router, block.shared_gate])
        inner = block.rule.intermediate_size
        for expert in block.experts.values():
            expert.gate_up, expert.down = stackable(expert.gate_up), stackable(expert.down)
        more_gate_up: list[Stack] = []
        more_down: list[Stack] = []
        if block.shared is not None:
            self.num_shared, rest = divmod(block.rule.shared_size, inner)
            if rest:
                raise UnsupportedModelError("a rank has less than one shared expert: leave --expert-parallel out")
            more_gate_up = gate_up_pieces(stack_of(stackable(block.shared.gate_up)), self.num_shared)
            more_down = down_pieces(stack_of(stackable(block.shared.down, inner)), self.num_shared)
            block.shared = None
        self.gate_up = stacked([expert.gate_up for expert in block.experts.values()], more_gate_up)
        self.down = stacked([expert.down for expert in block.experts.values()], more_down)


def prepare(block: Moe) -> None:
    """Stack the experts' weights, once: runners that measure memory and that serve share them."""
    if block.stacked is None:
        block.stacked = StackedExperts(block)


def stacked_of(block: Moe) -> StackedExperts:
    """The experts of a block that is prepared."""
    assert isinstance(block.stacked, StackedExperts), "`prepare` comes before ops"
    return block.stacked


def stackable(layer: Linear, piece: int | None = None) -> Linear:
    """The layer, or in int8 where grouped kernels do not take its groups. piece: columns, of each of its pieces."""
    if layer.order is not None or layer.dense is not None:
        raise UnsupportedModelError("experts on a GPU are plain or quantized linear layers")
    if layer.scales is None or not layer.group_size:
        return layer
    if layer.scales.dtype == torch.uint8:
        fits_kernels = piece is None  # no model has both
    else:
        fits_kernels = fits(piece or layer.num_columns, layer.group_size, layer.weight.dtype == WORDS)
    if fits_kernels:
        return layer
    plain = Linear(dequantized(layer, torch.bfloat16), layer.bias)
    return W8A16.of(plain, SplitKWorkspace(layer.weight.device, 1, 1))


def stack_of(layer: Linear) -> Stack:
    """One layer's."""
    return Stack(layer.weight, layer.scales, layer.bias)


def gate_up_pieces(layer: Stack, count: int) -> list[Stack]:
    """Cut gate_up into that of `count` experts, whose outputs add up to that of all as one. Without a bias."""

    def pieces(rows: Tensor) -> list[Tensor]:
        gate, up = rows.view(2, count, -1, *rows.shape[1:])
        return list(torch.cat([gate, up], dim=1))

    scales = [None] * count if layer.scales is None else pieces(layer.scales)
    return [Stack(*piece) for piece in zip(pieces(layer.weight), scales, strict=True)]


def down_pieces(layer: Stack, count: int) -> list[Stack]:
    """Cut down into that of `count` experts, see `gate_up_pieces`."""
    weight, scales = layer.weight, layer.scales
    is_packed = weight.dtype == WORDS
    columns = unpack_words(weight) if is_packed else weight
    weights = columns.view(len(columns), count, -1).unbind(1)
    if is_packed:  # whose words hold other columns than those of a wider weight
        weights = tuple(pack_words(values) for values in weights)
    if scales is None or scales.dim() == 1:
        return [Stack(piece, scales) for piece in weights]
    groups = scales.view(len(scales), count, -1, *scales.shape[2:]).unbind(1)
    return [Stack(*piece) for piece in zip(weights, groups, strict=True)]


def stacked(layers: list[Linear], more: list[Stack]) -> Stack:
    stacks = [*map(stack_of, layers), *more]
    if len({(each.weight.dtype, each.scales is None or each.scales.shape) for each in stacks}) > 1:
        raise UnsupportedModelError("a layer's experts must all be quantized alike, or none of them")
    weights = torch.stack([each.weight for each in stacks])
    known = [each.scales for each in stacks if each.scales is not None]
    scales = torch.stack(known) if known else None
    for index, layer in enumerate(layers):
        layer.weight, layer.scales = weights[index], None if scales is None else scales[index]
    biases = [each.bias for each in stacks if each.bias is not None]
    return Stack(weights, scales, torch.stack(biases) if biases else None)


def router_of(block: Moe, experts: StackedExperts, plain_router: Gemm) -> Gemm:
    """Logits of a normed x. plain_router: the router's GEMM in x's type."""
    if not block.rule.float32_router:
        return plain_router

    def float32(x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, experts.router.t(), out_dtype=torch.float32)
        return functional.linear(x.float(), experts.router.float())

    return float32


def chooser(block: Moe, num_shared: int, held: range | None = None) -> Choose:
    """Shares and slots, shared experts among them, of each token by its logits. held: see `route`; this rank's."""
    rule = block.rule
    held = held or rule.held_slots
    if block.slots is not None or block.loads is not None:
        return _chooser_of_all(block, num_shared, held)

    def choose(logits: Tensor, step: GpuStep | None) -> tuple[Tensor, Tensor]:
        return route(
            logits, block.num_chosen, rule.score == "softmax", rule.normalizes_weights, block.choice_bias,
            rule.weight_factor, rule.num_groups, rule.num_chosen_groups, rule.group_top, num_shared,
            held, rule.gates_shared,
        )  # fmt: skip

    return choose


def _chooser_of_all(block: Moe, num_shared: int, held: range) -> Choose:
    """As `chooser`, for a layer with a placement or whose choices are counted: those held are picked out behind."""
    from engine.expert_parallel.slots import ExpertSlots
    from kernels.gpu.expert_parallel.expert_loads import count_choices
    from kernels.gpu.expert_parallel.expert_slots import choose_slots

    rule, slots, loads = block.rule, block.slots, block.loads
    if slots is None and len(held) < rule.num_experts:
        slots = ExpertSlots(tuple(range(rule.num_experts)), block.router.device)

    def choose(logits: Tensor, step: GpuStep | None) -> tuple[Tensor, Tensor]:
        shares, chosen = route(
            logits, block.num_chosen, rule.score == "softmax", rule.normalizes_weights, block.choice_bias,
            rule.weight_factor, rule.num_groups, rule.num_chosen_groups, rule.group_top, num_shared,
            gates_shared=rule.gates_shared,
        )  # fmt: skip
        if loads is not None and step is not None:
            count_choices(chosen, step.slots, loads)
        if slots is not None:
            choose_slots(chosen, slots.table, slots.counts, held)
        return shares, chosen

    return choose


def moe(
    block: Moe, experts: StackedExperts, plain_router: Gemm, is_summed: bool = False
) -> Callable[[Tensor, GpuStep], Tensor | Partials]:  # fmt: skip
    """The block's output as partial sums, one for each of a token's experts, or their sum.

    Partial sums need all experts to be this rank's.
    """
    router, choose = router_of(block, experts, plain_router), chooser(block, experts.num_shared)

    def body(x: Tensor, step: GpuStep) -> Tensor | Partials:
        shares, chosen = choose(router(x), step)
        parts = outputs(experts, x, shares, chosen)
        return sum_of_held(parts, chosen) if is_summed else Partials(parts)

    return body


def outputs(
    experts: StackedExperts, x: Tensor, shares: Tensor, chosen: Tensor, listed: SortedPairs | None = None
) -> Tensor:
    """Partial sums (choices, num_tokens, hidden) of each token's choices, see `grouped_gemm`.

    listed: pairs by expert, if they are known and there are many.
    """
    gate_up, down, gate = experts.gate_up, experts.down, experts.gate
    num_experts, top_k, num_pairs = gate_up.weight.shape[0], chosen.shape[1], chosen.numel()
    max_pairs, max_per_expert = found(MAX_PAIRS.find(itemsize=gate_up.itemsize))
    if num_pairs <= min(max_pairs, max_per_expert * num_experts):
        gate_up_pairs, down_pairs = setting_of(GATE_UP_PAIRS, gate_up), setting_of(DOWN_PAIRS, down)
        inside = grouped_gemv(
            x, gate_up.weight, chosen, gate_up_pairs, top_k, scales=gate_up.scales, bias=gate_up.bias, gate=gate
        )  # fmt: skip
        return grouped_gemv(
            inside, down.weight, chosen, down_pairs, top_k, shares, scales=down.scales, bias=down.bias
        )  # fmt: skip
    # Of the power of two that holds the tokens: all variants of kernels are in the warm-up's steps.
    load = next_power_of_2(chosen.shape[0]) * top_k / num_experts
    pairs: SortedPairs | Tensor = chosen
    if is_listed(chosen.shape[0]):
        pairs = listed or sort_pairs(chosen, num_experts)
        if gate_up.multiplies_e4m3 and x.dtype == torch.bfloat16:
            e4m3_gate_up, e4m3_down = E4M3_GATE_UP.find(pairs_per_expert=load), E4M3_DOWN.find(pairs_per_expert=load)
            if e4m3_gate_up is not None and e4m3_down is not None:
                return _quantized_outputs(experts, x, shares, pairs, top_k, e4m3_gate_up, e4m3_down)
    gate_up_tile = found(GROUPED_GATE_UP.find(pairs_per_expert=load, itemsize=gate_up.itemsize))
    down_tile = found(
        GROUPED_DOWN.find(pairs_per_expert=load, itemsize=down.itemsize, columns=columns_of(down.weight))
    )
    inside = grouped_gemm(
        x, gate_up.weight, pairs, gate_up_tile, top_k, scales=gate_up.scales, bias=gate_up.bias, gate=gate
    )  # fmt: skip
    return grouped_gemm(inside, down.weight, pairs, down_tile, top_k, shares, down.scales, down.bias)


def _quantized_outputs(
    experts: StackedExperts, x: Tensor, shares: Tensor, pairs: SortedPairs, top_k: int, gate_up_tile: TileConfig,
    down_tile: TileConfig,
) -> Tensor:  # fmt: skip
    """As `outputs`, with inputs of both GEMMs quantized to e4m3, a scale a row, as those of linear layers are."""
    gate_up, down = experts.gate_up, experts.down
    values, scales = quantize_rows(x, FP8_DTYPE)
    inside = grouped_gemm(
        values, gate_up.weight, pairs, gate_up_tile, top_k, scales=gate_up.scales, bias=gate_up.bias,
        gate=experts.gate, x_scales=scales, dtype=x.dtype,
    )  # fmt: skip
    values, scales = quantize_many_rows(inside)
    return grouped_gemm(
        values, down.weight, pairs, down_tile, top_k, shares, down.scales, down.bias, x_scales=scales, dtype=x.dtype
    )


def is_listed(num_tokens: int) -> bool:
    """Whether there are so many tokens that their pairs are listed by expert."""
    return num_tokens > MAX_UNSORTED


def setting_of(table: Table[GemvConfig], weights: Stack) -> GemvConfig:
    return found(table.find(itemsize=weights.itemsize, columns=columns_of(weights.weight)))


def moe_of_row(block: Moe, experts: StackedExperts, logits_of: Gemm) -> Callable[[Tensor, GpuStep], None]:
    """Adds the block's output to a residual (1, hidden). logits_of: the router, given the residual, not normed."""
    gate_up, down = experts.gate_up, experts.down
    top_k, choose = block.num_chosen + experts.num_shared, chooser(block, experts.num_shared)
    row, down_row = setting_of(GATE_UP_ROW, gate_up), setting_of(DOWN_ROW, down)

    def add(residual: Tensor, step: GpuStep) -> None:
        shares, chosen = choose(logits_of(residual), step)
        inside = grouped_gemv(
            residual, gate_up.weight, chosen, row, top_k, norm=block.norm, eps=block.eps,
            scales=gate_up.scales, bias=gate_up.bias, gate=experts.gate,
        )  # fmt: skip
        add_down_of_row(inside, down.weight, chosen, shares, down_row, residual, down.scales, down.bias)

    return add
