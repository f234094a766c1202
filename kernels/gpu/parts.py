"""What stands behind a product in parts on a GPU: their sum, and in the same pass a norm or a gate.

add_rms_norm_of_parts:  residual += sum of parts;  y = rms_norm(residual)
silu_mul_of_parts:      y = silu(gate) * up, both sums of parts

Parts are added in float32 in their order. References: `kernels/rms_norm.py`, `kernels/silu_mul.py` of the sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import overlaps_launches, wait_for_predecessor
from kernels.gpu.silu_mul import silu_times

SILU_BLOCK = 1024


@triton.jit
def sum_of_parts(ptr, places, mask, part_stride, NUM_PARTS: tl.constexpr):
    """Elements at `places` of each part, added up in float32."""
    total = tl.load(ptr + places, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(ptr + part * part_stride + places, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _norm_kernel(
    parts_ptr, residual_ptr, weight_ptr, out_ptr, n, part_stride, eps, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    places = tl.program_id(0) * n + columns
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(OVERLAPS)
    residual = tl.load(residual_ptr + places, mask=inside, other=0.0)
    x = residual.to(tl.float32) + sum_of_parts(parts_ptr, places, inside, part_stride, NUM_PARTS)
    x = x.to(residual.dtype)
    tl.store(residual_ptr + places, x, mask=inside)
    value = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / n + eps)
    tl.store(out_ptr + places, (value * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm_of_parts(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds parts (num_parts, rows, n) to `residual` (rows, n), both contiguous, in place. Returns the sum's norm."""
    if not (parts.is_contiguous() and residual.is_contiguous()):
        raise ValueError("parts and residual must be contiguous")
    num_parts, num_rows, n = parts.shape
    out = torch.empty_like(residual)
    if num_rows:
        overlaps = overlaps_launches(parts)
        _norm_kernel[(num_rows,)](
            parts, residual, weight, out, n, num_rows * n, eps,
            NUM_PARTS=num_parts, BLOCK=triton.next_power_of_2(n), OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps,
        )  # fmt: skip
    return out


@triton.jit
def _silu_kernel(
    parts_ptr, out_ptr, n, part_stride, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    places = row * 2 * n + columns
    gate = sum_of_parts(parts_ptr, places, inside, part_stride, NUM_PARTS)
    up = sum_of_parts(parts_ptr, places + n, inside, part_stride, NUM_PARTS)
    value = silu_times(gate, up)
    tl.store(out_ptr + row * n + columns, value.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul_of_parts(parts: Tensor) -> Tensor:
    """(num_parts, rows, 2 n), contiguous -> (rows, n). At most 65,535 rows."""
    if not parts.is_contiguous():
        raise ValueError("parts must be contiguous")
    num_parts, num_rows, width = parts.shape
    n = width // 2
    out = torch.empty(num_rows, n, dtype=parts.dtype, device=parts.device)
    if num_rows:
        overlaps = overlaps_launches(parts)
        _silu_kernel[(triton.cdiv(n, SILU_BLOCK), num_rows)](
            parts, out, n, num_rows * width,
            NUM_PARTS=num_parts, BLOCK=SILU_BLOCK, OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps,
        )  # fmt: skip
    return out
