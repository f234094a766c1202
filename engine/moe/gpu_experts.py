"""A mixture of experts on a GPU: routing, then two grouped GEMMs over the experts' weights, stacked.

Nothing is read on the host, and grids depend on the number of tokens alone, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from triton import next_power_of_2

from engine.few_rows.partials import Partials
from engine.gpu.ops.rules import GpuStep
from engine.moe.expert_stacks import Stack, StackedExperts
from engine.moe.moe import Moe
from kernels.expert_gate import SILU
from kernels.gpu.few_rows.gemm_configs import GemvConfig, TileConfig
from kernels.gpu.moe.expert_formats import columns_of
from kernels.gpu.moe.expert_pairs import SortedPairs, sort_pairs
from kernels.gpu.moe.expert_tuning import (
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
from kernels.gpu.moe.grouped_gemm import MAX_UNSORTED, grouped_gemm, sum_of_held
from kernels.gpu.moe.grouped_gemv import add_down_of_row, grouped_gemv
from kernels.gpu.moe.moe_routing import route
from kernels.gpu.moe.packed_experts import packed_experts, takes_packed, tile_of
from kernels.gpu.quantization.quantize import quantize_many_rows, quantize_rows
from kernels.gpu.tuning import Table, found
from kernels.quantization.quantized_gemm import FP8_DTYPE

Gemm = Callable[[Tensor], Tensor]
Choose = Callable[[Tensor, GpuStep | None], tuple[Tensor, Tensor]]  # without a step nothing is counted


def router_of(block: Moe, experts: StackedExperts, plain_router: Gemm) -> Gemm:
    """Return the function from normed x to logits. plain_router: the router's GEMM in x's type."""
    if not block.rule.float32_router:
        return plain_router

    def float32(x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, experts.router.t(), out_dtype=torch.float32)
        return functional.linear(x.float(), experts.router.float())

    return float32


def chooser(block: Moe, num_shared: int, held: range | None = None) -> Choose:
    """Return the function from logits to shares and slots, with shared experts. held: this rank's, see `route`."""
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
    """As `chooser`, for a layer with a placement or whose choices are counted: those held are picked out after it."""
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
    """Compute the block's output as partial sums, one for each of a token's experts, or as their sum.

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
    """Return partial sums (choices, num_tokens, hidden), one for each of a token's experts, see `grouped_gemm`.

    listed: the pairs by expert, if there are many and they are listed already.
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
    # Rounded up to a power of two, so that the warm-up runs all variants of kernels.
    load = next_power_of_2(chosen.shape[0]) * top_k / num_experts
    pairs: SortedPairs | Tensor = chosen
    if is_listed(chosen.shape[0]) or takes_packed(x, gate_up.weight, gate_up.scales):
        pairs = listed or sort_pairs(chosen, num_experts)
        if gate_up.multiplies_e4m3 and x.dtype == torch.bfloat16:
            e4m3_gate_up, e4m3_down = E4M3_GATE_UP.find(pairs_per_expert=load), E4M3_DOWN.find(pairs_per_expert=load)
            if e4m3_gate_up is not None and e4m3_down is not None:
                return _quantized_outputs(experts, x, shares, pairs, top_k, e4m3_gate_up, e4m3_down)
    inside = _gemm(gate_up, x, pairs, load, top_k, gate=gate)
    return _gemm(down, inside, pairs, load, top_k, shares)


def _gemm(
    weights: Stack, x: Tensor, pairs: SortedPairs | Tensor, load: float, top_k: int, shares: Tensor | None = None,
    gate: tuple[float, float] = SILU,
) -> Tensor:  # fmt: skip
    """Compute gate_up, or with shares down, by the fastest kernel for the mean number of pairs per expert."""
    weight, scales, bias, is_gate_up = weights.weight, weights.scales, weights.bias, shares is None
    if scales is not None and isinstance(pairs, SortedPairs) and takes_packed(x, weight, scales):
        tile = tile_of(weight, scales, is_gate_up, load)
        if tile is not None:
            return packed_experts(x, weight, pairs, tile, top_k, shares, scales, bias, gate)
    table = GROUPED_GATE_UP if is_gate_up else GROUPED_DOWN
    config = found(table.find(pairs_per_expert=load, itemsize=weights.itemsize, columns=columns_of(weight)))
    return grouped_gemm(x, weight, pairs, config, top_k, shares, scales, bias, gate)


def _quantized_outputs(
    experts: StackedExperts, x: Tensor, shares: Tensor, pairs: SortedPairs, top_k: int, gate_up_tile: TileConfig,
    down_tile: TileConfig,
) -> Tensor:  # fmt: skip
    """Return `outputs` with the inputs of both GEMMs quantized to e4m3 by rows, as for linear layers."""
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
    """Whether there are so many tokens that pairs are listed by expert for any format of weights."""
    return num_tokens > MAX_UNSORTED


def setting_of(table: Table[GemvConfig], weights: Stack) -> GemvConfig:
    return found(table.find(itemsize=weights.itemsize, columns=columns_of(weights.weight)))


def moe_of_row(block: Moe, experts: StackedExperts, logits_of: Gemm) -> Callable[[Tensor, GpuStep], None]:
    """Add the block's output to a residual (1, hidden). logits_of: the router, which norms the residual itself."""
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
