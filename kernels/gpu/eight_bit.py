"""Products over 8-bit weights, int8 and e4m3 alike: of several rows, and of one row that is not rounded.

    y_mn = a_m s_n sum_k codes_mk w_nk + b_n                      `several_rows`, from codes or from plain x (a_m = 1)
    y_n = s_n sum_k x_k w_nk + b_n                                `one_row` of plain x, with norm, gate and residual

`codes_product` chooses between `several_rows` and, for few rows of codes, `kernels/gpu/few_codes.py`;
`kernels/gpu/rounding.py` makes codes.
References: `kernels/w8a8_gemm.py`, `kernels/fp8_gemm.py`, `kernels/rms_norm.py`, `kernels/silu_mul.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.few_codes import choose_few, few_rows
from kernels.gpu.launch import overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.silu_mul import silu_times
from kernels.gpu.small_m_gemm import MAX_PREFETCHED, SmallMWorkspace

LINE = tl.constexpr(128)  # weights of a line of the L2 cache


@dataclass(frozen=True, slots=True)
class RowConfig:
    """block_n x block_k: the tile of W in a program's loop."""

    block_n: int
    block_k: int
    num_warps: int = 2
    num_stages: int = 4


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """block_m tokens x block_n outputs a program; split_k programs share a tile's K."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4


@triton.jit
def _one_row_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, norm_ptr, out_ptr, N, K, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
    PREFETCHES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    ahead = tl.minimum(tl.arange(0, 8) * LINE, K - 1)
    prefetch(weight_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + ahead[None, :], PREFETCHES)
    wait_for_predecessor(OVERLAPS)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        ks = first + tl.arange(0, BLOCK_K)
        exists = inside[:, None] & (ks < K)[None, :]
        if EVEN:
            weight = tl.load(weight_rows + ks[None, :], eviction_policy="evict_first")
        else:
            weight = tl.load(weight_rows + ks[None, :], mask=exists, other=0)
        x = tl.load(x_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
        if GATED:  # rows N and on of the weight belong to `up`
            up_rows = weight_rows + N.to(tl.int64) * K
            if EVEN:
                up_weight = tl.load(up_rows + ks[None, :], eviction_policy="evict_first")
            else:
                up_weight = tl.load(up_rows + ks[None, :], mask=exists, other=0)
            total_up += up_weight.to(tl.float32) * x[None, :]
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    y = tl.sum(total, axis=1) * (scale * tl.load(scales_ptr + columns, mask=inside, other=0.0))
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(total_up, axis=1) * (scale * tl.load(scales_ptr + N + columns, mask=inside, other=0.0))
        if HAS_BIAS:
            up += tl.load(bias_ptr + N + columns, mask=inside, other=0.0).to(tl.float32)
        y = silu_times(y, up)
    if ADDS:
        y += tl.load(out_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _several_rows_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, M, N, K, x_stride,
    HAS_X_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCHES: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    tile_m = tile % num_m  # neighbours share a tile of W and run together
    tile_n = tile // num_m
    split = tl.program_id(1)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (columns < N)[:, None]
    has_row = (rows < M)[:, None]
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    num_steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(num_steps, SPLIT_K)
    ahead = tl.minimum(split * share * BLOCK_K + tl.arange(0, 8) * LINE, K - 1)
    prefetch(weight_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + ahead[None, :], PREFETCHES)
    column_scales = tl.load(scales_ptr + columns, mask=columns < N, other=0.0)[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    wait_for_predecessor(OVERLAPS)
    if HAS_X_SCALES:
        row_scales = tl.load(x_scales_ptr + rows, mask=rows < M, other=0.0)[None, :]
    IS_INT: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if IS_INT else tl.float32)
    for step in tl.range(split * share, tl.minimum(split * share + share, num_steps), num_stages=NUM_STAGES):
        ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN:
            weight = tl.load(weight_rows + ks[None, :])
            x = tl.load(x_rows + ks[None, :], mask=has_row, other=0.0)
        else:
            weight = tl.load(weight_rows + ks[None, :], mask=inside & (ks < K)[None, :], other=0.0)
            x = tl.load(x_rows + ks[None, :], mask=has_row & (ks < K)[None, :], other=0.0)
        if IS_INT:
            total = tl.dot(weight, tl.trans(x), total, out_dtype=tl.int32)
        elif HAS_X_SCALES:  # matrix units add e4m3 products with 14 bits: a step's sum is added outside of them
            total = tl.dot(weight, tl.trans(x), total, max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(weight.to(x_ptr.dtype.element_ty), tl.trans(x), total, input_precision="ieee")

    places = tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_M)[None, :] * BLOCK_N
    exists = inside & (rows < M)[None, :]
    is_last = True
    if SPLIT_K > 1:
        base = partials_ptr + tile * (SPLIT_K * BLOCK_N * BLOCK_M)
        tl.store(base + split * (BLOCK_N * BLOCK_M) + places, total, mask=exists)
        tl.debug_barrier()  # all of the program's stores come before its one release below
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            tl.store(counters_ptr + tile, 0)
            total = tl.zeros((BLOCK_N, BLOCK_M), total.dtype)
            for part in tl.static_range(SPLIT_K):
                total += tl.load(
                    base + part * (BLOCK_N * BLOCK_M) + places, mask=exists, other=0, cache_modifier=".cg"
                )
    if is_last:
        y = total.to(tl.float32) * column_scales
        if HAS_X_SCALES:
            y *= row_scales
        if HAS_BIAS:
            y += bias
        outputs = rows.to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=exists)


def choose_row(n: int, k: int) -> RowConfig:
    """For one row of plain x and an int8 weight (n, k) on an H200; conversion of W bounds it: 69% of bandwidth."""
    return RowConfig(4, 1024, 2, 1) if k > 4 * n else RowConfig(4, 512, 2, 3)


def choose_rows(num_rows: int, n: int, k: int) -> RowsConfig:
    """For several rows, both operands of one byte, and a weight (n, k)."""
    block_m = max(16, 1 << (num_rows - 1).bit_length())
    if block_m <= 64:
        num_tiles = -(-n // 64)
        if num_tiles > 128:
            return RowsConfig(block_m, 64, 128, 1, num_warps=4, num_stages=6)
        return RowsConfig(block_m, 64, 256, 1 if k <= 4096 and n > k else 2, num_warps=4, num_stages=4)
    if num_rows <= 512 or n * num_rows < 1 << 24:
        return RowsConfig(128, 64, 128, 1, num_warps=4, num_stages=4)
    return RowsConfig(128, 256, 128, 1, num_warps=8, num_stages=3)


def codes_product(
    codes: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    workspace: SmallMWorkspace,
) -> Tensor:  # fmt: skip
    """codes (rows, in), columns of stride 1; weight (out, in) of their type; scales by row. Returns (rows, out)."""
    num_rows, (n, k) = codes.shape[0], weight.shape
    few = choose_few(num_rows, n, k)
    if few is not None:
        return few_rows(codes, x_scales, weight, scales, bias, dtype, few)
    return several_rows(codes, x_scales, weight, scales, bias, dtype, workspace, choose_rows(num_rows, n, k))


def one_row(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, config: RowConfig, norm: Tensor | None = None,
    eps: float = 0.0, added_to: Tensor | None = None, is_gated: bool = False,
) -> Tensor:  # fmt: skip
    """One row through a whole step of a decoder: y = [silu(W_gate h) *] W h + b [+ added_to], h = x or its norm.

    x (1, in), contiguous. weight int8 (out, in), or (2 out, in) with the gate's rows first when `is_gated`; scales
    float32, one per row of it. norm, eps, added_to: as in `small_m_gemm.gemv`. Returns (1, out) in the dtype of x.
    """
    n, k = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    if x.shape != (1, k) or not weight.is_contiguous():
        raise ValueError(f"one row of {k} and a contiguous weight are needed, x is {list(x.shape)}: too many rows?")
    out = torch.empty(1, n, dtype=x.dtype, device=x.device) if added_to is None else added_to
    overlaps = overlaps_launches(x)
    _one_row_kernel[(triton.cdiv(n, config.block_n),)](
        x, weight, scales, _or(bias, x), _or(norm, x), out, n, k, eps,
        HAS_BIAS=bias is not None, HAS_NORM=norm is not None, ADDS=added_to is not None, GATED=is_gated,
        EVEN=n % config.block_n == 0 and k % config.block_k == 0, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        PREFETCHES=overlaps and weight.numel() <= MAX_PREFETCHED, num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out


def several_rows(
    x: Tensor, x_scales: Tensor | None, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    workspace: SmallMWorkspace, config: RowsConfig,
) -> Tensor:  # fmt: skip
    """x (rows, in): codes with `x_scales` (rows,), or plain values; columns of stride 1. Returns (rows, out)."""
    num_rows, k = x.shape
    n = weight.shape[0]
    if not weight.is_contiguous():
        raise ValueError("the weight must be contiguous")
    out = torch.empty(num_rows, n, dtype=dtype, device=x.device)
    num_tiles = triton.cdiv(n, config.block_n) * triton.cdiv(num_rows, config.block_m)
    size = num_tiles * config.split_k * config.block_n * config.block_m
    if config.split_k > 1 and (size > workspace.partials.numel() or num_tiles > workspace.counters.numel()):
        raise ValueError(f"the workspace is too small for {size} partial sums of {num_tiles} tiles")
    partials = workspace.partials.view(torch.int32) if x.dtype == torch.int8 else workspace.partials
    overlaps = overlaps_launches(x)
    _several_rows_kernel[(num_tiles, config.split_k)](
        x, _or(x_scales, scales), weight, scales, _or(bias, scales), out, partials, workspace.counters,
        num_rows, n, k, x.stride(0),
        HAS_X_SCALES=x_scales is not None, HAS_BIAS=bias is not None,
        EVEN=n % config.block_n == 0 and k % config.block_k == 0, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, SPLIT_K=config.split_k, NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        PREFETCHES=overlaps and weight.numel() <= MAX_PREFETCHED, num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer must be given even where the kernel does not use it."""
    return other if tensor is None else tensor
