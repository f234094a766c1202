"""Norms and gates that sum up split-K partials of GEMMs.

add_rms_norm_of_partials: `add_rms_norm` of the sum
silu_mul_of_partials:     `silu_mul` of the sum

Formulas and references are those of `kernels/gpu/elementwise`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.rms_norm import normed
from kernels.gpu.elementwise.silu_mul import BLOCK, silu_times
from kernels.gpu.few_rows.split_k import sum_partials
from kernels.gpu.launch import overlaps_launches, wait_for_predecessor


@triton.jit
def _add_rms_norm_of_partials_kernel(
    partials_ptr, residual_ptr, weight_ptr, out_ptr, n, split_stride, eps, NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    offsets = tl.program_id(0) * n + columns
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(OVERLAPS)
    residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0)
    x = residual.to(tl.float32) + sum_partials(partials_ptr, offsets, inside, split_stride, NUM_SPLITS)
    x = x.to(residual.dtype)
    tl.store(residual_ptr + offsets, x, mask=inside)
    tl.store(out_ptr + offsets, normed(x, weight, n, eps).to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm_of_partials(partials: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add partials (num_splits, rows, n) to `residual` (rows, n) in place. Returns the sum's norm. All contiguous."""
    if not (partials.is_contiguous() and residual.is_contiguous()):
        raise ValueError("partials and residual must be contiguous")
    num_splits, num_rows, n = partials.shape
    out = torch.empty_like(residual)
    if num_rows:
        overlaps = overlaps_launches(partials)
        _add_rms_norm_of_partials_kernel[(num_rows,)](
            partials, residual, weight, out, n, num_rows * n, eps,
            NUM_SPLITS=num_splits, BLOCK=triton.next_power_of_2(n),
            OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps,
        )  # fmt: skip
    return out


@triton.jit
def _silu_mul_of_partials_kernel(
    partials_ptr, out_ptr, n, split_stride, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    offsets = row * 2 * n + columns
    gate = sum_partials(partials_ptr, offsets, inside, split_stride, NUM_SPLITS)
    up = sum_partials(partials_ptr, offsets + n, inside, split_stride, NUM_SPLITS)
    value = silu_times(gate, up)
    tl.store(out_ptr + row * n + columns, value.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul_of_partials(partials: Tensor) -> Tensor:
    """Compute (num_splits, rows, 2 n), contiguous -> (rows, n). At most 65,535 rows."""
    if not partials.is_contiguous():
        raise ValueError("partials must be contiguous")
    num_splits, num_rows, width = partials.shape
    n = width // 2
    out = torch.empty(num_rows, n, dtype=partials.dtype, device=partials.device)
    if num_rows:
        overlaps = overlaps_launches(partials)
        _silu_mul_of_partials_kernel[(triton.cdiv(n, BLOCK), num_rows)](
            partials, out, n, num_rows * width,
            NUM_SPLITS=num_splits, BLOCK=BLOCK, OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps,
        )  # fmt: skip
    return out
