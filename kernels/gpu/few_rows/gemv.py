"""GEMV: one 16-bit row times a weight that streams through registers, without tensor cores.

    y = [silu(W_gate h) *] W h + b [+ residual],  h = x or its RMS norm

Norm, gate and residual are fused. Reference: `functional.linear`, `kernels/elementwise.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.silu_mul import gate_times
from kernels.gpu.few_rows.few_row_tuning import MAX_PREFETCHED_WEIGHTS
from kernels.gpu.few_rows.gemm_configs import GemvConfig
from kernels.gpu.launch import overlaps_launches, prefetch, wait_for_predecessor

LINE = tl.constexpr(64)  # elements per line of the L2 cache


@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, out_ptr, N, K, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr, IS_GELU: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCHES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    ahead = tl.minimum(tl.arange(0, 16) * LINE, K - 1)
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
            x = tl.load(x_ptr + ks).to(tl.float32)
        else:
            weight = tl.load(weight_rows + ks[None, :], mask=exists, other=0.0)
            x = tl.load(x_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
        if GATED:  # rows from N on of the weight belong to `up`
            up_rows = weight_rows + N.to(tl.int64) * K
            if EVEN:
                up = tl.load(up_rows + ks[None, :], eviction_policy="evict_first")
            else:
                up = tl.load(up_rows + ks[None, :], mask=exists, other=0.0)
            total_up += up.to(tl.float32) * x[None, :]
    y = tl.sum(total, axis=1)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
    if GATED:
        up = tl.sum(total_up, axis=1)
        if HAS_NORM:
            up *= scale
        y = gate_times(y, up, IS_GELU)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        y += tl.load(out_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: GemvConfig, norm: Tensor | None = None,
    eps: float = 0.0, added_to: Tensor | None = None, is_gated: bool = False, out_dtype: torch.dtype | None = None,
    is_gelu: bool = False,
) -> Tensor:  # fmt: skip
    """Compute one row of a fused decoder step: y = [silu(W_gate h) *] W h + b [+ added_to], h = x or its norm.

    x: (1, in), contiguous. weight: (out, in), or (2 out, in) with the gate's rows first if `is_gated`. is_gelu: GELU
    instead of SiLU, see `silu_mul`. norm: weight (in,) of the RMS norm of x with `eps`, not rounded in between.
    added_to: (1, out), the residual, to which y is added in place. out_dtype: of y, by default x's. Returns (1, out).
    """
    n, k = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    if x.shape != (1, k) or not weight.is_contiguous():
        raise ValueError(f"one row of {k} and a contiguous weight are needed, x is {list(x.shape)}: too many rows?")
    overlaps = overlaps_launches(x)
    out = torch.empty(1, n, dtype=out_dtype or x.dtype, device=x.device) if added_to is None else added_to
    _gemv_kernel[(triton.cdiv(n, config.block_n),)](
        x, weight, bias if bias is not None else x, norm if norm is not None else x, out, n, k, eps,
        HAS_BIAS=bias is not None, HAS_NORM=norm is not None, ADDS=added_to is not None, GATED=is_gated,
        IS_GELU=is_gelu,
        EVEN=n % config.block_n == 0 and k % config.block_k == 0, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        PREFETCHES=overlaps and weight.numel() <= MAX_PREFETCHED_WEIGHTS, num_warps=config.num_warps,
        launch_pdl=overlaps,
    )  # fmt: skip
    return out
