"""Skinny GEMM on a GPU, bound by reading W once: y = x W^T + b, of 16-bit numbers or of quantized rows and weights.

    y_mn = sum_k x_mk w_nk + b_n                 16 bits
    y_mn = a_m s_n sum_k q_mk w_nk + b_n         int8 or e4m3; q one plane of a row, or 256 h + l of two
                                                 (`kernels/gpu/quantization/quantize.py`)

A tile of W is the M operand of `tl.dot` and x, padded to 16 rows, the N operand. Narrow W has fewer tiles than the
GPU has multiprocessors, so K can be split (`split_k.py`). The result does not depend on padding rows.

References: `functional.linear`, `kernels/quantization/quantized_gemm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.few_rows.few_row_tuning import MAX_PREFETCHED_WEIGHTS
from kernels.gpu.few_rows.gemm_configs import TileConfig
from kernels.gpu.few_rows.split_k import SplitKWorkspace, reduce_splits
from kernels.gpu.launch import FastLaunch, overlaps_launches, prefetch, wait_for_predecessor

LINE_BITS = tl.constexpr(1024)  # per line of the L2 cache
PREFETCHED = tl.constexpr(1024)  # weights per row


@triton.jit
def join_planes(sums, PLANES: tl.constexpr):
    """Convert sums (columns, PLANES * rows) to float32 (columns, rows): of two planes, 256 of the first + second."""
    joined = sums.to(tl.float32)
    if PLANES == 2:
        high, low = tl.split(tl.reshape(joined, (sums.shape[0], sums.shape[1] // 2, 2)))
        joined = high * 256.0 + low
    return joined


@FastLaunch
@triton.jit(do_not_specialize_on_alignment=["M"])
def _skinny_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, M, N, K, x_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, PLANES: tl.constexpr, TILES_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCHES: tl.constexpr,
):  # fmt: skip
    """SCALED: x, of PLANES rows for each of y, and W are quantized. TILES_M: x may have more rows than one tile."""
    num_m = tl.cdiv(M * PLANES, BLOCK_M)
    tile = tl.program_id(0)
    tile_m = tile % num_m if TILES_M else 0  # adjacent programs share a tile of W and run together
    tile_n = tile // num_m if TILES_M else tile
    split = tl.program_id(1)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tile_m * (BLOCK_M // PLANES) + tl.arange(0, BLOCK_M // PLANES)
    inside = (columns < N)[:, None]
    has_row = (x_rows < M * PLANES)[:, None]
    weight_at = weight_ptr + columns.to(tl.int64)[:, None] * K
    x_at = x_ptr + (x_rows.to(tl.int64) if TILES_M else x_rows)[:, None] * x_stride
    num_steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(num_steps, SPLIT_K)
    LINE: tl.constexpr = LINE_BITS // weight_ptr.dtype.element_ty.primitive_bitwidth
    ahead = tl.minimum(split * share * BLOCK_K + tl.arange(0, PREFETCHED // LINE) * LINE, K - 1)
    prefetch(weight_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + ahead[None, :], PREFETCHES)
    if SCALED:
        column_scales = tl.load(scales_ptr + columns, mask=columns < N, other=0.0)[:, None]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    wait_for_predecessor(OVERLAPS)
    if SCALED:
        row_scales = tl.load(x_scales_ptr + rows, mask=rows < M, other=0.0)[None, :]
    IS_INT: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if IS_INT else tl.float32)
    for step in tl.range(split * share, tl.minimum(split * share + share, num_steps), num_stages=NUM_STAGES):
        ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN:
            weight = tl.load(weight_at + ks[None, :])
            x = tl.load(x_at + ks[None, :], mask=has_row, other=0.0)
        else:
            weight = tl.load(weight_at + ks[None, :], mask=inside & (ks < K)[None, :], other=0.0)
            x = tl.load(x_at + ks[None, :], mask=has_row & (ks < K)[None, :], other=0.0)
        if IS_INT:
            total = tl.dot(weight, tl.trans(x), total, out_dtype=tl.int32)
        elif SCALED:  # tensor cores add e4m3 products with 14 bits: a step's sum is added outside of them
            total = tl.dot(weight, tl.trans(x), total, max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")

    exists = inside & (x_rows < M * PLANES)[None, :]
    is_last, total = reduce_splits(total, partials_ptr, counters_ptr, tile, split, exists, SPLIT_K)
    if is_last:
        y = total
        if SCALED:
            y = join_planes(total, PLANES) * column_scales * row_scales
        elif HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        if HAS_BIAS:
            y += bias
        if TILES_M:
            outputs = rows.to(tl.int64)[None, :] * N + columns[:, None]
            tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=inside & (rows < M)[None, :])
        else:
            tl.store(out_ptr + rows[None, :] * N + columns[:, None], y.to(out_ptr.dtype.element_ty), mask=exists)


def skinny_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, workspace: SplitKWorkspace, config: TileConfig,
    x_scales: Tensor | None = None, scales: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Multiply x (rows, in), columns of stride 1; weight (out, in), contiguous; bias (out,) or None -> (rows, out).

    Quantized: x holds values (num_planes * rows, in) with x_scales (rows,), weight has scales (out,), and the result
    has `dtype`.
    """
    num_x_rows, k = x.shape
    num_rows = num_x_rows if x_scales is None else x_scales.shape[0]
    n = weight.shape[0]
    if not weight.is_contiguous():
        raise ValueError("the weight must be contiguous")
    block_m = max(16, min(config.block_m, triton.next_power_of_2(num_x_rows)))
    num_tiles = triton.cdiv(n, config.block_n) * triton.cdiv(num_x_rows, block_m)
    workspace.check(num_tiles, config.block_n * block_m, config.split_k)
    partials = workspace.partials.view(torch.int32) if x.dtype == torch.int8 else workspace.partials
    overlaps = overlaps_launches(x)
    out = torch.empty(num_rows, n, dtype=dtype or x.dtype, device=x.device)
    _skinny_kernel[(num_tiles, config.split_k)](
        x, x_scales, weight, scales, x if bias is None else bias, out, partials, workspace.counters,
        num_rows, n, k, x.stride(0),
        HAS_BIAS=bias is not None, EVEN=n % config.block_n == 0 and k % config.block_k == 0,
        SCALED=scales is not None, PLANES=num_x_rows // num_rows, TILES_M=scales is not None or num_x_rows > block_m,
        BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT_K=config.split_k,
        NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        PREFETCHES=overlaps and weight.numel() <= MAX_PREFETCHED_WEIGHTS, num_warps=config.num_warps,
        launch_pdl=overlaps,
    )  # fmt: skip
    return out
