"""Quantization of activations to int8 or e4m3, with one scale per row, in the kernels that produce them.

    q_mk = round(x_mk / a_m),  a_m = max_k |x_mk| / MAX

MAX is 127, or 448 for e4m3. With two int8 planes it is 32,639: a 16-bit value is 256 h + l, and its planes are two
rows of int8, h first.

    quantize_rows           x itself
    quantize_many_rows      the same to e4m3, for short rows so many that one program per row takes longer
    add_rms_norm_quantize   x = RMS norm of a residual, to which the pending output, or partial sums of it, may be
                            added first
    silu_mul_quantize       x = silu(gate) * up, gate and up concatenated
    quantize_with_maxima    x itself, given the largest magnitudes of a row's tiles: many programs share a row

References: `quantize_rows_int8` and `quantize_rows_fp8` in `kernels/`, `kernels/elementwise.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.silu_mul import silu_times
from kernels.gpu.few_rows.split_k import sum_partials
from kernels.gpu.launch import FastLaunch, is_compiled, overlaps_launches, wait_for_predecessor
from kernels.quantization.quantized_gemm import FP8_DTYPE, FP8_MAX, INT8_MAX

PLANES_MAX = 32639.0  # 127 * 256 + 127
TWO_PLANES = tl.constexpr(PLANES_MAX)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
TINY = tl.constexpr(1e-30)  # makes rows of zeros zeros
MANY_ROWS_BLOCK = 4096  # numbers per program of `quantize_many_rows`
MAXIMA_BLOCK = 2048  # columns per program of `quantize_with_maxima`


@triton.jit
def to_e4m3(x, COMPILED: tl.constexpr):
    """Round float32 to e4m3, ties to even; |x| <= 448. By hand in the interpreter, which rounds wrongly."""
    if not COMPILED:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)  # 2^-6; steps of 2^-9 below
    return x.to(tl.float8e4nv)


@triton.jit
def _store_quantized(x, largest, values_ptr, row, K, ks, MAX: tl.constexpr, COMPILED: tl.constexpr):
    """Quantize float32 x of a row whose largest magnitude is `largest`."""
    x *= MAX / tl.maximum(largest, TINY)
    inside = ks < K
    if MAX == 448.0:
        tl.store(values_ptr + row * K + ks, to_e4m3(x, COMPILED), mask=inside)
    else:
        number = (x + ROUND).to(tl.int32, bitcast=True)
        if MAX == TWO_PLANES:
            high = ((number << 16) + (128 << 16)) >> 24  # of 256 h + l, -128 <= l < 128
            tl.store(values_ptr + 2 * row * K + ks, high.to(tl.int8), mask=inside)
            tl.store(values_ptr + (2 * row + 1) * K + ks, number.to(tl.int8), mask=inside)
        else:
            tl.store(values_ptr + row * K + ks, number.to(tl.int8), mask=inside)


@triton.jit
def quantize_row(x, values_ptr, scales_ptr, row, K, ks, MAX: tl.constexpr, COMPILED: tl.constexpr):
    """Quantize one row of float32 x, zero beyond its K columns. Returns its largest magnitude."""
    magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # ordered as |x|, with NaN above all
    largest = tl.max(magnitudes, axis=0).to(tl.float32, bitcast=True)
    _store_quantized(x, largest, values_ptr, row, K, ks, MAX, COMPILED)
    tl.store(scales_ptr + row, largest / MAX)
    return largest


@FastLaunch
@triton.jit
def _quantize_kernel(
    x_ptr, residual_ptr, norm_ptr, values_ptr, scales_ptr, K, x_stride, eps, PROLOGUE: tl.constexpr,
    NUM_ADDED: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """One row per program. Arguments that a prologue does not read are None. NaN in x gives scale NaN, which GEMMs
    pass on.

    NUM_ADDED: partial sums x, x_stride apart, that are added to a residual.
    """
    if PROLOGUE == "norm":  # its weight does not depend on the previous kernel
        columns = tl.arange(0, BLOCK)
        norm = tl.load(norm_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    ks = tl.arange(0, BLOCK)
    inside = ks < K
    if PROLOGUE == "norm":
        value = tl.load(residual_ptr + row * K + ks, mask=inside, other=0.0)
        dtype = value.dtype
        if NUM_ADDED > 0:
            added = sum_partials(x_ptr, row * K + ks, inside, x_stride, NUM_ADDED)
            value = (value.to(tl.float32) + added).to(dtype)
            tl.store(residual_ptr + row * K + ks, value, mask=inside)
        value = value.to(tl.float32)
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / K + eps) * norm
        x = value.to(dtype).to(tl.float32)
    elif PROLOGUE == "silu_mul":
        gate = tl.load(x_ptr + row * 2 * K + ks, mask=inside, other=0.0)
        up = tl.load(x_ptr + row * 2 * K + K + ks, mask=inside, other=0.0)
        x = silu_times(gate.to(tl.float32), up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * x_stride + ks, mask=inside, other=0.0).to(tl.float32)
    quantize_row(x, values_ptr, scales_ptr, row, K, ks, MAX, COMPILED)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_many_rows_kernel(
    x_ptr, values_ptr, scales_ptr, num_rows, K, MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """ROWS rows per program."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ks = tl.arange(0, BLOCK)[None, :]
    exists = rows < num_rows
    inside = exists[:, None] & (ks < K)
    wait_for_predecessor(OVERLAPS)
    x = tl.load(x_ptr + rows[:, None] * K + ks, mask=inside, other=0.0).to(tl.float32)
    magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitudes, axis=1).to(tl.float32, bitcast=True)
    x *= (MAX / tl.maximum(largest, TINY))[:, None]
    tl.store(values_ptr + rows[:, None] * K + ks, to_e4m3(x, COMPILED), mask=inside)
    tl.store(scales_ptr + rows, largest / MAX, mask=exists)


@triton.jit
def _quantize_with_maxima_kernel(
    x_ptr, maxima_ptr, values_ptr, scales_ptr, K, num_maxima, MAX: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
    ks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tiles = tl.arange(0, PADDED)
    x = tl.load(x_ptr + row * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    maxima = tl.load(maxima_ptr + row * num_maxima + tiles, mask=tiles < num_maxima, other=0.0)
    largest = tl.max(maxima.to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)  # NaN is above all
    _store_quantized(x, largest, values_ptr, row, K, ks, MAX, COMPILED)
    tl.store(scales_ptr + row, largest / MAX, mask=tl.program_id(0) == 0)


def quantize_rows(x: Tensor, dtype: torch.dtype, num_planes: int = 1) -> tuple[Tensor, Tensor]:
    """Quantize x (rows, in), columns of stride 1, to `dtype` (num_planes * rows, in) and float32 scales (rows,)."""
    outputs = empty_quantized(x.shape[0], x.shape[1], dtype, num_planes, x.device)
    _quantize(outputs, num_planes, x, x_stride=x.stride(0))
    return outputs


def quantize_many_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x (rows, in), contiguous, to e4m3 as `quantize_rows` does."""
    (num_rows, k), block = x.shape, triton.next_power_of_2(x.shape[1])
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    values, scales = empty_quantized(num_rows, k, FP8_DTYPE, 1, x.device)
    rows, overlaps = max(1, MANY_ROWS_BLOCK // block), overlaps_launches(x)
    if num_rows:
        _quantize_many_rows_kernel[(triton.cdiv(num_rows, rows),)](
            x, values, scales, num_rows, k, MAX=FP8_MAX, ROWS=rows, BLOCK=block, OVERLAPS=overlaps,
            COMPILED=is_compiled(x), num_warps=8, launch_pdl=overlaps,
        )  # fmt: skip
    return values, scales


def add_rms_norm_quantize(
    x: Tensor | None, residual: Tensor, norm: Tensor, eps: float, dtype: torch.dtype, num_planes: int = 1
) -> tuple[Tensor, Tensor]:
    """Add x, if given, to `residual` (rows, n) in place, and quantize the RMS norm of the sum.

    x: (rows, n), or partial sums (parts, rows, n).
    """
    if not residual.is_contiguous() or (x is not None and not x.is_contiguous()):
        raise ValueError("x and residual must be contiguous")
    outputs = empty_quantized(residual.shape[0], residual.shape[1], dtype, num_planes, residual.device)
    added = residual if x is None else x
    num_added, part_stride = (0 if x is None else 1), None
    if added.dim() == 3:
        num_added, part_stride = added.shape[0], added.stride(0)
    _quantize(outputs, num_planes, added, "norm", part_stride, residual, norm, eps, num_added)
    return outputs


def silu_mul_quantize(gate_up: Tensor, dtype: torch.dtype, num_planes: int = 1) -> tuple[Tensor, Tensor]:
    """Compute silu(gate) * up of (rows, 2 n), gate first: values (num_planes * rows, n), scales (rows,)."""
    if not gate_up.is_contiguous():
        raise ValueError("gate_up must be contiguous")
    outputs = empty_quantized(gate_up.shape[0], gate_up.shape[1] // 2, dtype, num_planes, gate_up.device)
    _quantize(outputs, num_planes, gate_up, "silu_mul")
    return outputs


def _quantize(
    outputs: tuple[Tensor, Tensor], num_planes: int, x: Tensor, prologue: str = "", x_stride: int | None = None,
    residual: Tensor | None = None, norm: Tensor | None = None, eps: float | None = None, num_added: int = 0,
) -> None:  # fmt: skip
    values, scales = outputs
    if scales.shape[0]:
        block = triton.next_power_of_2(values.shape[1])
        overlaps = overlaps_launches(values)
        _quantize_kernel[(scales.shape[0],)](
            x, residual, norm, values, scales, values.shape[1], x_stride, eps, PROLOGUE=prologue,
            NUM_ADDED=num_added, MAX=largest_value(values.dtype, num_planes), BLOCK=block,
            OVERLAPS=overlaps, COMPILED=is_compiled(values), num_warps=min(16, max(4, block // 512)),
            launch_pdl=overlaps,
        )  # fmt: skip


def quantize_with_maxima(x: Tensor, maxima: Tensor, dtype: torch.dtype, num_planes: int = 1) -> tuple[Tensor, Tensor]:
    """Quantize x (rows, n), contiguous. maxima: float32 (rows, any), which include each row's largest |x|."""
    (num_rows, n), num_maxima = x.shape, maxima.shape[1]
    values, scales = empty_quantized(num_rows, n, dtype, num_planes, x.device)
    if num_rows:
        overlaps = overlaps_launches(x)
        _quantize_with_maxima_kernel[(triton.cdiv(n, MAXIMA_BLOCK), num_rows)](
            x, maxima, values, scales, n, num_maxima, MAX=largest_value(dtype, num_planes), BLOCK=MAXIMA_BLOCK,
            PADDED=triton.next_power_of_2(num_maxima), OVERLAPS=overlaps, COMPILED=is_compiled(values), num_warps=4,
            launch_pdl=overlaps,
        )  # fmt: skip
    return values, scales


def largest_value(dtype: torch.dtype, num_planes: int) -> float:
    """Return the largest quantized value, MAX above. Raises ValueError."""
    if num_planes == 1:
        return FP8_MAX if dtype == FP8_DTYPE else INT8_MAX
    if num_planes != 2 or dtype != torch.int8:
        raise ValueError(f"{num_planes} planes of {dtype}: two of int8 are the most")
    return PLANES_MAX


def empty_quantized(
    num_rows: int, n: int, dtype: torch.dtype, num_planes: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    scales = torch.empty(num_rows, dtype=torch.float32, device=device)
    return torch.empty(num_planes * num_rows, n, dtype=dtype, device=device), scales
