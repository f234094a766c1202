"""Grouped GEMMs of a mixture of experts on a GPU: each row of x times the weight of an expert that it chose.

    gate_up   h_p = silu(W_gate[e] x_t) * (W_up[e] x_t)      for each pair p = (token t, its j-th expert e)
    down      y_jt = share_p W_down[e] h_p

Both may have a bias, and the gate may be the clamped one of `engine/moe/stacked_moe.py`.

Pairs are numbered t * top_k + j; those of experts on other ranks are left out. If there are many, `sort_pairs`
(`kernels/gpu/moe/expert_pairs.py`) lists them by expert, and a program computes a tile of an expert's pairs and of
its columns. No rows are moved or padded in memory, since a tile gathers x by pair. For up to 16 tokens, an expert's
tile has a row for each token, chosen or not, and nothing is sorted; for even fewer there is
`kernels/gpu/moe/grouped_gemv.py`. The grid depends only on the number of pairs, so a step can be captured; programs
without a tile return.

y is left as top_k partial sums per token, in the order of the token's experts, which the next norm adds
(`add_rms_norm_of_partials`). A token's result does not depend on the other tokens.

Reference: `engine/moe/moe.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.expert_gate import SILU
from kernels.gpu.few_rows.gemm_configs import TileConfig
from kernels.gpu.launch import is_compiled, overlaps_launches, wait_for_predecessor
from kernels.gpu.moe.activation import clamped_times
from kernels.gpu.moe.expert_formats import ExpertForm, columns_of, form_of
from kernels.gpu.moe.expert_pairs import SortedPairs
from kernels.gpu.moe.grouped_words import packed_tile
from kernels.gpu.quantization.nibbles import as_compute
from kernels.quantization.quantized_gemm import FP8_DTYPE

MAX_UNSORTED = 16  # tokens that fit into the smallest tile


@triton.jit
def _tile_of(counts_ptr, order_ptr, tile, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile's (expert, pairs (BLOCK_M,), whether each exists); expert NUM_EXPERTS after the last tile."""
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    is_before = ends <= tile
    expert = tl.minimum(tl.sum(is_before.to(tl.int32)), NUM_EXPERTS)
    row = (tile - tl.sum(tl.where(is_before, tiles, 0))) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < tl.sum(tl.where(experts == expert, counts, 0))
    place = tl.sum(tl.where(is_before, counts, 0)) + row
    pairs = tl.load(order_ptr + place, mask=exists, other=0)
    return expert, pairs, exists


@triton.jit
def _tokens_of(chosen_ptr, expert, num_tokens, TOP_K: tl.constexpr, CHOICES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return an expert's (pairs (BLOCK_M,), whether each exists). Row m is token m: one tile holds all tokens."""
    tokens, places = tl.arange(0, BLOCK_M), tl.arange(0, CHOICES)
    is_there = (tokens < num_tokens)[:, None] & (places < TOP_K)[None, :]
    chosen = tl.load(chosen_ptr + tokens[:, None] * TOP_K + places[None, :], mask=is_there, other=-1)
    matches = (chosen == expert).to(tl.int32)  # a token chooses an expert at most once
    return tokens * TOP_K + tl.sum(matches * places[None, :], axis=1), tl.sum(matches, axis=1) > 0


@triton.jit
def weighted_places(pairs, shares_ptr, exists, num_tokens, TOP_K: tl.constexpr):
    """Return each pair's row in (top_k * num_tokens) partial sums, and its expert's share."""
    return (pairs % TOP_K) * num_tokens + pairs // TOP_K, tl.load(shares_ptr + pairs, mask=exists, other=0.0)


@triton.jit
def _add_dot(
    weight, x, total, scales_ptr, weight_rows, has_scale, K, first, GROUP: tl.constexpr, COMPUTE: tl.constexpr
):
    """Add a tile's products to `total`, scaled by columns' GROUP if there are groups."""
    if GROUP == 0:
        total = tl.dot(weight.to(COMPUTE), x, total, input_precision="ieee")
    else:
        scale = tl.load(scales_ptr + weight_rows * (K // GROUP) + first // GROUP, mask=has_scale, other=0.0)[:, None]
        if x.shape[1] > 32:  # scaled sums in addition to the total would not fit the registers
            total = tl.dot((weight.to(tl.float32) * scale).to(COMPUTE), x, total, input_precision="ieee")
        else:
            total += scale * tl.dot(weight.to(COMPUTE), x, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _grouped_kernel(
    x_ptr, x_scales_ptr, weight_ptr, boxes, scales_ptr, bias_ptr, order_ptr, counts_ptr, shares_ptr, out_ptr,
    num_tokens, N, K, x_stride,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    IS_SORTED: tl.constexpr, COLUMNS_FIRST: tl.constexpr, HAS_BOXES: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    WORDS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    X_COLUMNS: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """GATED: x has a row per token, out one per pair. Otherwise x has one per pair, and out holds partials.

    COLUMNS_FIRST: programs of one tile of pairs are adjacent. x_scales_ptr: None if x is not quantized. boxes: with
    HAS_BOXES, the weights of all experts as one matrix.
    """
    wait_for_predecessor(OVERLAPS)
    tile, block = tl.program_id(0), tl.program_id(1)
    if COLUMNS_FIRST:
        tile, block = block, tile
    if IS_SORTED:
        expert, pairs, has_row = _tile_of(counts_ptr, order_ptr, tile, NUM_EXPERTS, EXPERTS, BLOCK_M)
        if expert >= NUM_EXPERTS:
            return
    else:  # order_ptr holds the choices of all tokens
        expert = tile
        pairs, has_row = _tokens_of(order_ptr, expert, num_tokens, TOP_K, CHOICES, BLOCK_M)
        if tl.sum(has_row.to(tl.int32)) == 0:
            return
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (columns < N)[:, None]
    x_rows = pairs // TOP_K if GATED else pairs
    x_at = x_ptr + x_rows.to(tl.int64)[:, None] * x_stride
    HALVES: tl.constexpr = 2 if GATED else 1
    weight_rows = expert.to(tl.int64) * (HALVES * N) + columns
    first_row = (expert * (HALVES * N) + block * BLOCK_N).to(tl.int32)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if FORMAT == "whole":
        weight_at = weight_ptr + weight_rows[:, None] * K
        for first in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            ks = first + tl.arange(0, BLOCK_K)
            if EVEN:
                x = tl.trans(tl.load(x_at + ks[None, :], mask=has_row[:, None], other=0.0))
            else:
                x = tl.trans(tl.load(x_at + ks[None, :], mask=has_row[:, None] & (ks < K)[None, :], other=0.0))
            if HAS_BOXES:  # rows after the expert's are not stored
                weight = boxes.load([first_row, first])
            elif EVEN:
                weight = tl.load(weight_at + ks[None, :])
            else:
                weight = tl.load(weight_at + ks[None, :], mask=inside & (ks < K)[None, :], other=0.0)
            x = as_compute(x, COMPUTE)
            total = _add_dot(weight, x, total, scales_ptr, weight_rows, columns < N, K, first, GROUP, COMPUTE)
            if GATED:
                up_at = weight_at + N.to(tl.int64) * K
                if HAS_BOXES:
                    up = boxes.load([first_row + N, first])
                elif EVEN:
                    up = tl.load(up_at + ks[None, :])
                else:
                    up = tl.load(up_at + ks[None, :], mask=inside & (ks < K)[None, :], other=0.0)
                up_rows = weight_rows + N
                total_up = _add_dot(up, x, total_up, scales_ptr, up_rows, columns < N, K, first, GROUP, COMPUTE)
    else:
        total, total_up = packed_tile(
            x_at, has_row, weight_ptr, scales_ptr, weight_rows, N.to(tl.int64), columns < N, K, total, total_up,
            GATED, FORMAT, GROUP, WORDS, BLOCK_K // (4 * WORDS), EVEN, X_COLUMNS, NUM_STAGES, COMPILED,
        )  # fmt: skip
    if x_scales_ptr is not None:
        x_scales = tl.load(x_scales_ptr + x_rows, mask=has_row, other=0.0)[None, :]
        total *= x_scales
        if GATED:
            total_up *= x_scales
    if HAS_SCALES:
        total *= tl.load(scales_ptr + weight_rows, mask=columns < N, other=0.0)[:, None]
        if GATED:
            total_up *= tl.load(scales_ptr + weight_rows + N, mask=columns < N, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias_ptr + weight_rows, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            total_up += tl.load(bias_ptr + weight_rows + N, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        y, rows = clamped_times(total, total_up, ALPHA, LIMIT), pairs
    else:
        rows, shares = weighted_places(pairs, shares_ptr, has_row, num_tokens, TOP_K)
        y = total * shares[None, :]
    outputs = rows.to(tl.int64)[None, :] * N + columns[:, None]
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=inside & has_row[None, :])


def _compute_dtype(x: Tensor, weight: Tensor) -> tl.dtype:
    """Return the dtype of dots: x's, but float16 for 8-bit weights, which convert to it in one instruction."""
    if x.dtype == torch.float32:
        return tl.float32
    if x.dtype == FP8_DTYPE:
        return tl.float8e4nv
    return tl.float16 if weight.itemsize == 1 or x.dtype == torch.float16 else tl.bfloat16


def takes_boxes(x: Tensor, weight: Tensor, config: TileConfig) -> bool:
    """Whether weights are loaded through a tensor descriptor: by TMA, without threads or registers."""
    is_wanted = config.by_descriptor and weight.dtype == x.dtype and weight.shape[-1] * weight.itemsize % 16 == 0
    return is_wanted and (x.device.type == "cpu" or overlaps_launches(x))


def grouped_gemm(
    x: Tensor, weight: Tensor, pairs: SortedPairs | Tensor, config: TileConfig, top_k: int,
    shares: Tensor | None = None, scales: Tensor | None = None, bias: Tensor | None = None,
    gate: tuple[float, float] = SILU, x_scales: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute grouped GEMMs of many pairs.

    Without shares, gate_up: x (num_tokens, in), weight (num_experts, 2 n, in), gate first -> (num_pairs, n).
    With shares, float32 (num_tokens, top_k), down: x (num_pairs, in), weight (num_experts, n, in) -> partial sums
    (top_k, num_tokens, n). Columns of x have stride 1; weights are contiguous.

    Weights of 8 and 4 bits have scales, see `form_of`. bias: (num_experts, rows) or None. gate: alpha and limit of
    `clamped_times`, for gate_up. pairs: sorted; or for up to MAX_UNSORTED tokens their choices, int32 (num_tokens,
    top_k), contiguous. x_scales: float32, of the rows of an e4m3 x; weights are then e4m3 with scales of rows. dtype:
    of the output; None: that of x.
    """
    form = form_of(weight, scales)
    if x_scales is not None and (weight.dtype != x.dtype or not form.has_row_scales):
        raise ValueError("a quantized x needs weights of its type with scales of their rows")
    out, n, k, num_tokens = output_of(x, weight, shares, top_k, form, dtype)
    num_experts = weight.shape[0]
    num_pairs = num_tokens * top_k
    block_k = form.columns_at_once(config.block_k)
    if form.words and k % block_k:
        block_k = 4 * form.words  # so that no step is partly empty
    smallest = min(MAX_UNSORTED, config.block_m)
    if isinstance(pairs, SortedPairs):
        order, counts = pairs.order, pairs.counts
        block_m = max(smallest, min(config.block_m, triton.next_power_of_2(num_tokens)))
        num_tiles = min(num_pairs, triton.cdiv(num_pairs, block_m) + num_experts)  # an expert's last may not be full
    else:
        if num_tokens > MAX_UNSORTED:
            raise ValueError(f"{num_tokens} tokens: more than {MAX_UNSORTED} must be sorted")
        order, counts, num_tiles = pairs, pairs, num_experts
        block_m = smallest if num_tokens <= smallest else MAX_UNSORTED
    overlaps = overlaps_launches(x)
    grid = num_tiles, triton.cdiv(n, config.block_n)
    has_boxes = takes_boxes(x, weight, config)
    boxes = weight
    if has_boxes:
        matrix = weight.view(-1, k)
        boxes = TensorDescriptor(matrix, list(matrix.shape), [k, 1], [config.block_n, block_k])
    _grouped_kernel[grid[::-1] if config.columns_first else grid](
        x, x_scales, weight, boxes, x if scales is None else form.scales_of(scales), bias, order, counts,
        x if shares is None else shares, out, num_tokens, n, k, x.stride(0),
        NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts), TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k), IS_SORTED=isinstance(pairs, SortedPairs),
        COLUMNS_FIRST=config.columns_first, HAS_BOXES=has_boxes, GATED=shares is None,
        EVEN=(has_boxes or n % config.block_n == 0) and k % block_k == 0, HAS_SCALES=form.has_row_scales,
        HAS_BIAS=bias is not None, ALPHA=gate[0], LIMIT=gate[1], FORMAT=form.name, GROUP=form.group,
        WORDS=form.words, COMPUTE=_compute_dtype(x, weight), BLOCK_M=block_m, BLOCK_N=config.block_n,
        BLOCK_K=block_k, X_COLUMNS=x.shape[1] % k, NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        COMPILED=is_compiled(x), num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def _sum_kernel(
    parts_ptr, chosen_ptr, out_ptr, num_tokens, n, TOP_K: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """One program for BLOCK columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    wait_for_predecessor(OVERLAPS)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        is_held = tl.load(chosen_ptr + token * TOP_K + j) >= 0
        part = tl.load(parts_ptr + (j * num_tokens + token) * n + columns, mask=inside & is_held, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + token * n + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_of_held(parts: Tensor, chosen: Tensor) -> Tensor:
    """Sum up (top_k, num_tokens, n), without experts of other ranks. Returns (num_tokens, n)."""
    top_k, num_tokens, n = parts.shape
    out = torch.empty(num_tokens, n, dtype=parts.dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(n))
    overlaps = overlaps_launches(parts)
    _sum_kernel[(num_tokens, triton.cdiv(n, block))](
        parts, chosen, out, num_tokens, n, TOP_K=top_k, BLOCK=block, OVERLAPS=overlaps, num_warps=4,
        launch_pdl=overlaps,
    )  # fmt: skip
    return out


def output_of(
    x: Tensor, weight: Tensor, shares: Tensor | None, top_k: int, form: ExpertForm, dtype: torch.dtype | None = None
) -> tuple[Tensor, int, int, int]:
    """Return (output, n, k, number of tokens). dtype: None: that of x."""
    dtype = dtype or x.dtype
    k = columns_of(weight)
    if not weight.is_contiguous() or k not in (x.shape[1], form.num_filled(x.shape[1])):
        raise ValueError(f"a contiguous weight of {x.shape[1]} columns is needed, this one has {k}")
    if shares is None:
        n, num_tokens = weight.shape[1] // 2, x.shape[0]
        return torch.empty(num_tokens * top_k, n, dtype=dtype, device=x.device), n, k, num_tokens
    n, num_tokens = weight.shape[1], x.shape[0] // top_k
    return torch.empty(top_k, num_tokens, n, dtype=dtype, device=x.device), n, k, num_tokens
