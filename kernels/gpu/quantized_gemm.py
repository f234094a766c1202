"""GEMMs of quantized rows with 8-bit weights, int8 and e4m3 alike.

    y_mn = a_m s_n sum_k q_mk w_nk + b_n       q one plane of a row, or 256 h + l of two (`kernels/gpu/quantize.py`)

`quantized_gemm` chooses between `tiled_gemm` and, for few rows, `kernels/gpu/sliced_k_gemm.py`.
References: `kernels/w8a8_gemm.py`, `kernels/fp8_gemm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.sliced_k_gemm import choose_sliced_k, join_planes, sliced_k_gemm
from kernels.gpu.small_m_gemm import MAX_PREFETCHED
from kernels.gpu.split_k import SplitKWorkspace, reduce_splits

LINE = tl.constexpr(128)  # weights of a line of the L2 cache


@dataclass(frozen=True, slots=True)
class TileConfig:
    """block_m rows of planes x block_n outputs a program; split_k programs share a tile's K."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4


@triton.jit
def _tiled_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, M, N, K, x_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PLANES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCHES: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(M * PLANES, BLOCK_M)
    tile = tl.program_id(0)
    tile_m = tile % num_m  # neighbours share a tile of W and run together
    tile_n = tile // num_m
    split = tl.program_id(1)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    plane_rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tile_m * (BLOCK_M // PLANES) + tl.arange(0, BLOCK_M // PLANES)
    inside = (columns < N)[:, None]
    has_row = (plane_rows < M * PLANES)[:, None]
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    x_rows = x_ptr + plane_rows.to(tl.int64)[:, None] * x_stride
    num_steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(num_steps, SPLIT_K)
    ahead = tl.minimum(split * share * BLOCK_K + tl.arange(0, 8) * LINE, K - 1)
    prefetch(weight_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + ahead[None, :], PREFETCHES)
    column_scales = tl.load(scales_ptr + columns, mask=columns < N, other=0.0)[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    wait_for_predecessor(OVERLAPS)
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
        else:  # matrix units add products of e4m3 with 14 bits: a step's sum is added outside of them
            total = tl.dot(weight, tl.trans(x), total, max_num_imprecise_acc=BLOCK_K)

    exists = inside & (plane_rows < M * PLANES)[None, :]
    is_last, total = reduce_splits(total, partials_ptr, counters_ptr, tile, split, exists, SPLIT_K)
    if is_last:
        y = join_planes(total, PLANES) * column_scales * row_scales
        if HAS_BIAS:
            y += bias
        outputs = rows.to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=inside & (rows < M)[None, :])


def choose_tile_config(num_rows: int, n: int, k: int) -> TileConfig:
    """For quantized rows and a weight (n, k)."""
    block_m = max(16, 1 << (num_rows - 1).bit_length())
    if block_m <= 64:
        num_tiles = -(-n // 64)
        if num_tiles > 128:
            return TileConfig(block_m, 64, 128, 1, num_warps=4, num_stages=6)
        return TileConfig(block_m, 64, 256, 1 if k <= 4096 and n > k else 2, num_warps=4, num_stages=4)
    if num_rows <= 512 or n * num_rows < 1 << 24:
        return TileConfig(128, 64, 128, 1, num_warps=4, num_stages=4)
    return TileConfig(128, 256, 128, 1, num_warps=8, num_stages=3)


def quantized_gemm(
    values: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    workspace: SplitKWorkspace,
) -> Tensor:  # fmt: skip
    """values (rows or twice as many, in), columns of stride 1; weight (out, in) of their type; scales by row.

    Returns (rows, out).
    """
    num_plane_rows, (n, k) = values.shape[0], weight.shape
    config = choose_sliced_k(num_plane_rows, n, k)
    if config is not None:
        return sliced_k_gemm(values, x_scales, weight, scales, bias, dtype, config)
    return tiled_gemm(
        values, x_scales, weight, scales, bias, dtype, workspace, choose_tile_config(num_plane_rows, n, k)
    )


def tiled_gemm(
    values: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    workspace: SplitKWorkspace, config: TileConfig,
) -> Tensor:  # fmt: skip
    """values (rows or twice as many, in), columns of stride 1; x_scales (rows,). Returns (rows, out)."""
    num_plane_rows, k = values.shape
    num_rows, n = x_scales.shape[0], weight.shape[0]
    if not weight.is_contiguous():
        raise ValueError("the weight must be contiguous")
    out = torch.empty(num_rows, n, dtype=dtype, device=values.device)
    num_tiles = triton.cdiv(n, config.block_n) * triton.cdiv(num_plane_rows, config.block_m)
    workspace.check(num_tiles, config.block_n * config.block_m, config.split_k)
    partials = workspace.partials.view(torch.int32) if values.dtype == torch.int8 else workspace.partials
    overlaps = overlaps_launches(values)
    _tiled_kernel[(num_tiles, config.split_k)](
        values, x_scales, weight, scales, scales if bias is None else bias, out, partials, workspace.counters,
        num_rows, n, k, values.stride(0),
        HAS_BIAS=bias is not None, EVEN=n % config.block_n == 0 and k % config.block_k == 0,
        PLANES=num_plane_rows // num_rows, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SPLIT_K=config.split_k, NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        PREFETCHES=overlaps and weight.numel() <= MAX_PREFETCHED, num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out
