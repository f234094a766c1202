"""Experts of few rows on a GPU: GEMVs of pairs of a token and an expert, without sorting.

    gate_up, down    as in `kernels/gpu/moe/grouped_gemm.py`; each program computes columns of one pair
    one row's down   residual += sum_j share_j W_down[e_j] h_j, with all of the row's experts in one program

Weights stream through registers, without tensor cores. Reference: `engine/moe/moe.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.expert_gate import SILU
from kernels.gpu.few_rows.gemm_configs import GemvConfig
from kernels.gpu.few_rows.gemv import LINE
from kernels.gpu.launch import (
    is_compiled,
    let_successor_start,
    overlaps_launches,
    prefetch,
    wait_first,
    wait_for_predecessor,
)
from kernels.gpu.moe.activation import clamped_times
from kernels.gpu.moe.expert_formats import columns_of, form_of
from kernels.gpu.moe.grouped_gemm import output_of, weighted_places
from kernels.gpu.moe.grouped_words import packed_row


@triton.jit
def _scaled(weight, scales_ptr, weight_rows, has_scale, K, first, GROUP: tl.constexpr):
    """Convert a tile (rows..., columns) to float32, scaled by columns' GROUP if there are groups."""
    scaled = weight.to(tl.float32)
    if GROUP > 0:
        scale = tl.load(scales_ptr + weight_rows * (K // GROUP) + first // GROUP, mask=has_scale, other=0.0)
        scaled *= tl.expand_dims(scale, len(weight.shape) - 1)
    return scaled


@triton.jit(do_not_specialize=["num_tokens"])
def _pair_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, chosen_ptr, shares_ptr, norm_ptr, out_ptr,
    num_tokens, N, K, x_stride, eps,
    TOP_K: tl.constexpr, GATED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    X_COLUMNS: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """As `_grouped_kernel`, with one pair per program. HAS_NORM: x is a residual, whose RMS norm is computed."""
    pair = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    wait_first(OVERLAPS)
    let_successor_start(OVERLAPS)  # it reads `chosen` before it waits for this kernel
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    if expert < 0:  # on another rank
        return
    x_at = x_ptr + (pair // TOP_K if GATED else pair).to(tl.int64) * x_stride
    HALVES: tl.constexpr = 2 if GATED else 1
    weight_rows = expert * (HALVES * N) + columns
    if FORMAT == "whole":
        weight_at = weight_ptr + weight_rows[:, None] * K
        total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        total_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        squares = tl.zeros((BLOCK_K,), tl.float32)
        for first in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            ks = first + tl.arange(0, BLOCK_K)
            exists = inside[:, None] & (ks < K)[None, :]
            up_at = weight_at + N.to(tl.int64) * K
            if EVEN:
                x = tl.load(x_at + ks).to(tl.float32)
                weight = tl.load(weight_at + ks[None, :])
            else:
                x = tl.load(x_at + ks, mask=ks < K, other=0.0).to(tl.float32)
                weight = tl.load(weight_at + ks[None, :], mask=exists, other=0.0)
            if HAS_NORM:
                squares += x * x
                x *= tl.load(norm_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
            total += _scaled(weight, scales_ptr, weight_rows, inside, K, first, GROUP) * x[None, :]
            if GATED:
                if EVEN:
                    up = tl.load(up_at + ks[None, :])
                else:
                    up = tl.load(up_at + ks[None, :], mask=exists, other=0.0)
                total_up += _scaled(up, scales_ptr, weight_rows + N, inside, K, first, GROUP) * x[None, :]
    else:
        CHUNKS: tl.constexpr = BLOCK_K // (4 * WORDS)
        at = x_at + tl.zeros((CHUNKS,), tl.int32)
        rows = weight_rows[None, :] + tl.zeros((CHUNKS, 1), tl.int64)
        parts, up_parts, squares = packed_row(
            at, norm_ptr, weight_ptr, scales_ptr, rows, N.to(tl.int64), inside[None, :], tl.arange(0, CHUNKS), K,
            GATED, HAS_NORM, FORMAT, GROUP, WORDS, CHUNKS, EVEN, X_COLUMNS, NUM_STAGES, COMPILED,
        )  # fmt: skip
        total, total_up = tl.trans(parts), tl.trans(up_parts)
    y = tl.sum(total, axis=1)
    if HAS_SCALES:
        y *= tl.load(scales_ptr + weight_rows, mask=inside, other=0.0)
    if GATED:
        up = tl.sum(total_up, axis=1)
        if HAS_SCALES:
            up *= tl.load(scales_ptr + weight_rows + N, mask=inside, other=0.0)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(squares, axis=0) / (X_COLUMNS if X_COLUMNS > 0 else K) + eps)
            y *= scale
            up *= scale
        if HAS_BIAS:
            y += tl.load(bias_ptr + weight_rows, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(bias_ptr + weight_rows + N, mask=inside, other=0.0).to(tl.float32)
        y = clamped_times(y, up, ALPHA, LIMIT)
        row = pair
    else:
        if HAS_BIAS:
            y += tl.load(bias_ptr + weight_rows, mask=inside, other=0.0).to(tl.float32)
        row, share = weighted_places(pair, shares_ptr, True, num_tokens, TOP_K)
        y *= share
    tl.store(out_ptr + row.to(tl.int64) * N + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _row_down_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, chosen_ptr, shares_ptr, residual_ptr, N, K,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, LINES: tl.constexpr, OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """CHOICES: TOP_K, padded to a power of two.

    The previous kernel is the row's `_pair_kernel`, which starts this one once `chosen` is complete.
    """
    SLICES: tl.constexpr = 1 if FORMAT == "whole" else BLOCK_K // (4 * WORDS)  # of K, per expert
    places = tl.arange(0, CHOICES * SLICES) // SLICES
    is_chosen = places < TOP_K
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    experts = tl.load(chosen_ptr + places, mask=is_chosen, other=0).to(tl.int64)
    weight_rows = (experts * N)[:, None] + tl.minimum(columns, N - 1)[None, :]
    if FORMAT == "whole":
        weight_at = weight_ptr + weight_rows[:, :, None] * K
        prefetch(weight_at + tl.minimum(tl.arange(0, LINES) * LINE, K - 1)[None, None, :], OVERLAPS)
        wait_for_predecessor(OVERLAPS)
        x_at = x_ptr + places[:, None] * K
        total = tl.zeros((CHOICES, BLOCK_N, BLOCK_K), tl.float32)
        for first in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            ks = first + tl.arange(0, BLOCK_K)
            x_exists = is_chosen[:, None] & (ks < K)[None, :]
            x = tl.load(x_at + ks[None, :], mask=x_exists, other=0.0).to(tl.float32)
            if EVEN:
                weight = tl.load(weight_at + ks[None, None, :])
            else:
                exists = x_exists[:, None, :] & inside[None, :, None]
                weight = tl.load(weight_at + ks[None, None, :], mask=exists, other=0.0)
            total += _scaled(weight, scales_ptr, weight_rows, True, K, first, GROUP) * x[:, None, :]
        shares = tl.load(shares_ptr + places, mask=is_chosen, other=0.0)
        y_of = tl.sum(total, axis=2)
    else:
        wait_for_predecessor(OVERLAPS)
        y_of, _none, _squares = packed_row(
            x_ptr + tl.minimum(places, TOP_K - 1) * K, x_ptr, weight_ptr, scales_ptr, weight_rows, 0,
            is_chosen[:, None] & inside[None, :], tl.arange(0, CHOICES * SLICES) % SLICES, K,
            False, False, FORMAT, GROUP, WORDS, SLICES, EVEN, 0, NUM_STAGES, COMPILED,
        )  # fmt: skip
        shares = tl.load(shares_ptr + places, mask=is_chosen, other=0.0)
    if HAS_SCALES:
        y_of *= tl.load(scales_ptr + weight_rows)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + weight_rows).to(tl.float32)
        if SLICES > 1:  # slices' sums add up to an expert's
            bias = tl.where((tl.arange(0, CHOICES * SLICES) % SLICES == 0)[:, None], bias, 0.0)
        y_of += bias
    y = tl.sum(y_of * shares[:, None], axis=0)
    y += tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_ptr + columns, y.to(residual_ptr.dtype.element_ty), mask=inside)


def grouped_gemv(
    x: Tensor, weight: Tensor, chosen: Tensor, config: GemvConfig, top_k: int, shares: Tensor | None = None,
    norm: Tensor | None = None, eps: float = 0.0, scales: Tensor | None = None, bias: Tensor | None = None,
    gate: tuple[float, float] = SILU,
) -> Tensor:  # fmt: skip
    """Compute `grouped_gemm` for few pairs. chosen: int32 (num_tokens, top_k), contiguous.

    norm: weight (in,) of the RMS norm of x with `eps`, without rounding in between; for gate_up.
    """
    form = form_of(weight, scales)
    out, n, k, num_tokens = output_of(x, weight, shares, top_k, form)
    block_n, block_k = form.tile(config.block_n, config.block_k)
    overlaps = overlaps_launches(x)
    _pair_kernel[(triton.cdiv(n, block_n), num_tokens * top_k)](
        x, weight, x if scales is None else form.scales_of(scales), bias, chosen,
        x if shares is None else shares,
        x if norm is None else norm, out,
        num_tokens, n, k, x.stride(0), eps,
        TOP_K=top_k, GATED=shares is None, HAS_NORM=norm is not None, HAS_SCALES=form.has_row_scales,
        HAS_BIAS=bias is not None, ALPHA=gate[0], LIMIT=gate[1], EVEN=n % block_n == 0 and k % block_k == 0,
        FORMAT=form.name, GROUP=form.group, WORDS=form.words, BLOCK_N=block_n, BLOCK_K=block_k,
        X_COLUMNS=x.shape[1] % k, NUM_STAGES=config.num_stages, OVERLAPS=overlaps, COMPILED=is_compiled(x),
        num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out


def add_down_of_row(
    x: Tensor, weight: Tensor, chosen: Tensor, shares: Tensor, config: GemvConfig, residual: Tensor,
    scales: Tensor | None = None, bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Add one row's experts to `residual` (1, n), in place.

    x: (top_k, in), contiguous. weight: (num_experts, n, in), contiguous. chosen: int32, shares: float32, (1, top_k).
    scales, bias: see `grouped_gemm`.
    """
    top_k, k = x.shape
    n, form = weight.shape[1], form_of(weight, scales)
    if chosen.shape != (1, top_k) or residual.shape != (1, n) or columns_of(weight) != k or not x.is_contiguous():
        raise ValueError(f"one row of {top_k} experts is needed, chosen are {list(chosen.shape)}")
    overlaps = overlaps_launches(x)
    choices, (block_n, block_k) = triton.next_power_of_2(top_k), form.tile(config.block_n, config.block_k)
    _row_down_kernel[(triton.cdiv(n, block_n),)](
        x, weight, x if scales is None else form.scales_of(scales), bias, chosen, shares, residual, n, k,
        TOP_K=top_k, CHOICES=choices, HAS_SCALES=form.has_row_scales, HAS_BIAS=bias is not None,
        EVEN=choices == top_k and n % block_n == 0 and k % block_k == 0,
        FORMAT=form.name, GROUP=form.group, WORDS=form.words, BLOCK_N=block_n, BLOCK_K=block_k,
        NUM_STAGES=config.num_stages, LINES=triton.next_power_of_2(triton.cdiv(k, LINE.value)), OVERLAPS=overlaps,
        COMPILED=is_compiled(x), num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
