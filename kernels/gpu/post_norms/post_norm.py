"""Norms on both sides of a residual addition on a GPU, for blocks whose output is normed before it is added.

    residual += rms_norm(x) * post_weight;  y = rms_norm(residual) * weight

One program per row, as in `kernels/gpu/elementwise/rms_norm.py`; the sum is rounded before it is normed, but not its
terms. Reference: `kernels/elementwise.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.rms_norm import normed, num_warps_for
from kernels.gpu.launch import FastLaunch, overlaps_launches, wait_for_predecessor


@FastLaunch
@triton.jit
def _post_norm_kernel(
    x_ptr, residual_ptr, post_ptr, weight_ptr, out_ptr, n, x_stride, eps, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    post = tl.load(post_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(OVERLAPS)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row * n + columns, mask=inside, other=0.0)
    total = (residual.to(tl.float32) + normed(x, post, n, eps)).to(residual.dtype)
    tl.store(residual_ptr + row * n + columns, total, mask=inside)
    tl.store(out_ptr + row * n + columns, normed(total, weight, n, eps).to(out_ptr.dtype.element_ty), mask=inside)


def post_norm_add_norm(x: Tensor, post_weight: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add the norm of x (num_rows, n), columns of stride 1, to `residual` (num_rows, n, contiguous) in place.

    Returns the norm of the sum (num_rows, n). post_weight, weight: (n,), of any dtype.
    """
    if not residual.is_contiguous():
        raise ValueError("the residual must be contiguous")
    num_rows, n = x.shape
    out = torch.empty_like(residual)
    if num_rows:
        overlaps = overlaps_launches(x)
        _post_norm_kernel[(num_rows,)](
            x, residual, post_weight, weight, out, n, x.stride(0), eps, BLOCK=triton.next_power_of_2(n),
            OVERLAPS=overlaps, num_warps=num_warps_for(n), launch_pdl=overlaps,
        )  # fmt: skip
    return out
