"""Skinny GEMM of up to 16 quantized rows with 8-bit weights, int8 or e4m3, whose K is sliced over a program's warps.

A row of x may be two int8 planes (`kernels/gpu/quantization/quantize.py`): q_mk is then 256 h_mk + l_mk, and the sums
of h and of l are joined at the end.

    y_mn = a_m s_n sum_k q_mk w_nk + b_n                           `sliced_k_gemm`
    h_mn = silu(y_mn) y_m(N + n), and the largest |h_m| per tile   `sliced_k_gated_gemm`

A program computes few columns of y over all of K: its warps take different slices of a K step, and their sums are
added at the end. So there are enough programs for all multiprocessors without split-K between programs, whose stores,
counter and second read took 2 us of a GEMM of 6. Inputs that do not depend on the previous kernel are read before the
wait for it: scales, bias and the first tiles of W.

Knows nothing of how rows are quantized. Reference: `kernels/quantization/quantized_gemm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.silu_mul import silu_times
from kernels.gpu.few_rows.skinny_gemm import join_planes
from kernels.gpu.launch import overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.quantization.quantized_tuning import SlicedKConfig

MAX_ROWS = 16
LINE = tl.constexpr(128)  # weights per line of the L2 cache


@triton.jit(do_not_specialize_on_alignment=["M"])
def _sliced_k_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, maxima_ptr, M, N, K, x_stride,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, PLANES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, AHEAD: tl.constexpr, PREFETCHED: tl.constexpr,
    NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = SLICES * BLOCK_K
    TILE: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    first_column = tl.program_id(0) * BLOCK_N
    offsets = tl.arange(0, TILE)
    columns = first_column + offsets
    inside = columns < N
    if GATED:  # rows from N on of the weight belong to `up`
        columns = first_column + offsets % BLOCK_N + offsets // BLOCK_N * N
        inside = first_column + offsets % BLOCK_N < N
    plane_rows = tl.arange(0, BLOCK_M)
    has_row = (plane_rows < M * PLANES)[None, :, None]
    rows = tl.arange(0, BLOCK_M // PLANES)
    at = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    weight_at = weight_ptr + columns.to(tl.int64)[None, :, None] * K + at[:, None, :]
    x_at = x_ptr + plane_rows.to(tl.int64)[None, :, None] * x_stride + at[:, None, :]
    if PREFETCHED > 0:
        lines = tl.minimum(AHEAD * STEP + tl.arange(0, PREFETCHED) * LINE, K - 1)
        first_row = weight_ptr + tl.where(inside, columns, 0).to(tl.int64)[:, None] * K
        prefetch(first_row + lines[None, :], OVERLAPS)
    scales = tl.load(scales_ptr + columns, mask=inside, other=0.0)[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    # As e4m3, whatever the type: int8 would go through shared memory immediately, one after the other.
    ahead_at = weight_at.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    ahead = ()
    for step in tl.static_range(AHEAD):
        exists = inside[None, :, None] & (step * STEP + at < K)[:, None, :]
        tile = tl.load(ahead_at + step * STEP, mask=exists, other=0.0)
        ahead = ahead + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_predecessor(OVERLAPS)
    x_scales = tl.load(x_scales_ptr + rows, mask=rows < M, other=0.0)[None, :]
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros((SLICES, TILE, BLOCK_M), SUM)
    for step in tl.static_range(AHEAD):
        x = tl.load(x_at + step * STEP, mask=has_row & (step * STEP + at < K)[:, None, :], other=0.0)
        weight = ahead[step].to(x.dtype, bitcast=True)  # type: ignore[var-annotated]
        total = tl.dot(weight, tl.permute(x, (0, 2, 1)), total, out_dtype=SUM)
    for first in tl.range(AHEAD * STEP, K, STEP, num_stages=NUM_STAGES):
        if EVEN:
            weight = tl.load(weight_at + first)
            x = tl.load(x_at + first, mask=has_row, other=0.0)
        else:
            in_row = (first + at < K)[:, None, :]
            weight = tl.load(weight_at + first, mask=inside[None, :, None] & in_row, other=0.0)
            x = tl.load(x_at + first, mask=has_row & in_row, other=0.0)
        total = tl.dot(weight, tl.permute(x, (0, 2, 1)), total, out_dtype=SUM)
    y = join_planes(tl.sum(total, axis=0), PLANES) * scales * x_scales
    if HAS_BIAS:
        y += bias
    if GATED:  # rounded in between, as where gate and up are a separate GEMM
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, BLOCK_N, BLOCK_M // PLANES)), (1, 2, 0)))
        y = silu_times(gate, up)
    outputs = first_column + tl.arange(0, BLOCK_N)
    exists = (outputs < N)[:, None] & (rows < M)[None, :]
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows.to(tl.int64)[None, :] * N + outputs[:, None], y, mask=exists)
    if GATED:
        bits = y.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # ordered as |y|, with NaN above all
        largest = tl.max(tl.where(exists, bits, 0), axis=0).to(tl.float32, bitcast=True)
        tl.store(maxima_ptr + rows * tl.num_programs(0) + tl.program_id(0), largest, mask=rows < M)


def sliced_k_gemm(
    values: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    config: SlicedKConfig,
) -> Tensor:  # fmt: skip
    """Multiply values (up to 16, in), columns of stride 1, x_scales (rows,) by weight (out, in): (rows, out)."""
    out = torch.empty(x_scales.shape[0], weight.shape[0], dtype=dtype, device=values.device)
    _launch(values, x_scales, weight, scales, bias, out, None, config)
    return out


def sliced_k_gated_gemm(
    values: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    config: SlicedKConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply by weight (2 n, in), gate first -> (rows, n), and its largest magnitudes, float32 (rows, tiles)."""
    n = weight.shape[0] // 2
    num_rows = x_scales.shape[0]
    out = torch.empty(num_rows, n, dtype=dtype, device=values.device)
    maxima = torch.empty(num_rows, triton.cdiv(n, config.block_n), dtype=torch.float32, device=values.device)
    _launch(values, x_scales, weight, scales, bias, out, maxima, config)
    return out, maxima


def _launch(
    values: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor,
    maxima: Tensor | None, config: SlicedKConfig,
) -> None:  # fmt: skip
    num_plane_rows, k = values.shape
    num_rows, n = out.shape
    if num_plane_rows > MAX_ROWS:
        raise ValueError(f"{num_plane_rows} quantized rows are too many")
    if not weight.is_contiguous():
        raise ValueError("the weight must be contiguous")
    overlaps = overlaps_launches(values)
    step = config.num_warps * config.block_k
    _sliced_k_kernel[(triton.cdiv(n, config.block_n),)](
        values, x_scales, weight, scales, scales if bias is None else bias, out, scales if maxima is None else maxima,
        num_rows, n, k, values.stride(0),
        HAS_BIAS=bias is not None, GATED=maxima is not None, EVEN=n % config.block_n == 0 and k % step == 0,
        PLANES=num_plane_rows // num_rows, BLOCK_M=8 if num_plane_rows <= 8 else 16, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, SLICES=config.num_warps, AHEAD=min(config.ahead, k // step),
        PREFETCHED=config.prefetched if overlaps else 0,
        NUM_STAGES=config.num_stages, OVERLAPS=overlaps, num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
