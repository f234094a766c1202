"""Linear maps for few rows on a GPU: y = x W^T + b, bound by reading W once.

Two kernels. `_gemv_kernel`, for one row: W streams through registers, no matrix units. `_small_m_kernel`, up to 64
rows: a tile of W is the M operand of `tl.dot` and x, padded to 16 rows, the N operand. Narrow W does not give every
multiprocessor a tile, so K can be split: each split leaves float32 partial sums, and the last one to finish (a
counter per tile) adds them in the order of the splits. The result does not depend on timing, nor on padding rows.

`choose` says which shapes win by measurement; everything else belongs to cuBLAS. Reference: `functional.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.silu_mul import silu_times
from kernels.gpu.split_k import SplitKWorkspace, reduce_splits

MAX_ROWS = 64
MAX_PREFETCHED = 1 << 23  # weights; a whole step of Qwen3-0.6B 3% faster at 1 and 8 rows, of Qwen2.5-7B 2% slower
LINE = tl.constexpr(64)  # elements of a line of the L2 cache


@dataclass(frozen=True, slots=True)
class SmallMConfig:
    """block_n x block_k: the tile of W in a program's loop. split_k: programs that share a tile's K."""

    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    is_gemv: bool = False


MAX_WINNING_ROWS = 32  # at 64 rows cuBLAS is 10 to 15% faster


# For `gemv` with a norm or a gate: both are nearly free where W is large (Qwen2.5-7B gate_up: 63.5 us with, 62.6
# without; other settings up to 75).
FUSED_GEMV = SmallMConfig(4, 256, num_warps=2, num_stages=5, is_gemv=True)


def choose(num_rows: int, n: int, k: int) -> SmallMConfig | None:
    """What to run for x (num_rows, k) and weight (n, k) in bfloat16 on an H200; None: cuBLAS.

    Against cuBLAS, shapes of Qwen2.5-7B and Qwen3-0.6B: one row 1.10 to 1.4 times as fast, 1.9 and 3.9 where n is
    1024; 8 and 32 rows 1.02 to 1.4. Tall weights want many small programs, wide ones loads in flight within each.
    """
    if num_rows > MAX_WINNING_ROWS:
        return None
    if num_rows == 1:
        if n > k:
            return SmallMConfig(2, 512, num_warps=2, num_stages=1, is_gemv=True)
        return FUSED_GEMV
    num_tiles = n // 64
    if num_tiles < 33:  # each of 4 splits costs less than idle multiprocessors
        return SmallMConfig(64, 128, 4, num_stages=4)
    return SmallMConfig(64, 128, 1 if num_tiles > 128 or k <= 4096 else 2, num_stages=6)


@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, out_ptr, N, K, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
    PREFETCHES: tl.constexpr,
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
        if GATED:  # rows N and on of the weight belong to `up`
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
        y = silu_times(y, up)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        y += tl.load(out_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _small_m_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, M, N, K, x_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCHES: tl.constexpr,
):  # fmt: skip
    tile_n = tl.program_id(0)
    split = tl.program_id(1)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inside = (columns < N)[:, None]
    has_row = (rows < M)[:, None]
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    x_rows = x_ptr + rows[:, None] * x_stride
    num_tiles = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(num_tiles, SPLIT_K)
    ahead = tl.minimum(split * share * BLOCK_K + tl.arange(0, 16) * LINE, K - 1)
    prefetch(weight_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + ahead[None, :], PREFETCHES)
    wait_for_predecessor(OVERLAPS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in tl.range(split * share, tl.minimum(split * share + share, num_tiles), num_stages=NUM_STAGES):
        ks = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN:
            weight = tl.load(weight_rows + ks[None, :])
            x = tl.load(x_rows + ks[None, :], mask=has_row, other=0.0)
        else:
            weight = tl.load(weight_rows + ks[None, :], mask=inside & (ks < K)[None, :], other=0.0)
            x = tl.load(x_rows + ks[None, :], mask=has_row & (ks < K)[None, :], other=0.0)
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")

    exists = inside & (rows < M)[None, :]
    is_last, total = reduce_splits(total, partials_ptr, counters_ptr, tile_n, split, exists, SPLIT_K)
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + rows[None, :] * N + columns[:, None], total.to(out_ptr.dtype.element_ty), mask=exists)


def small_m_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, workspace: SplitKWorkspace, config: SmallMConfig
) -> Tensor:
    """x (rows <= 64, in), columns of stride 1; weight (out, in), contiguous; bias (out,) or None -> (rows, out)."""
    if config.is_gemv:
        return gemv(x, weight, bias, config)
    num_rows, k = x.shape
    n = weight.shape[0]
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows are too many")
    if not weight.is_contiguous():
        raise ValueError("the weight must be contiguous")
    num_tiles = triton.cdiv(n, config.block_n)
    even = n % config.block_n == 0 and k % config.block_k == 0
    block_m = max(16, triton.next_power_of_2(num_rows))
    workspace.check(num_tiles, config.block_n * block_m, config.split_k)
    overlaps = overlaps_launches(x)
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    _small_m_kernel[(num_tiles, config.split_k)](
        x, weight, bias if bias is not None else x, out, workspace.partials, workspace.counters,
        num_rows, n, k, x.stride(0),
        HAS_BIAS=bias is not None, EVEN=even, BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SPLIT_K=config.split_k, NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        PREFETCHES=overlaps and weight.numel() <= MAX_PREFETCHED, num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: SmallMConfig, norm: Tensor | None = None,
    eps: float = 0.0, added_to: Tensor | None = None, is_gated: bool = False,
) -> Tensor:  # fmt: skip
    """One row through a whole step of a decoder: y = [silu(W_gate h) *] W h + b [+ added_to], h = x or its norm.

    x: (1, in), contiguous. weight: (out, in), or (2 out, in) with the gate's rows first when `is_gated`.
    norm: weight (in,) of the RMS norm of x with `eps`, not rounded in between. added_to: (1, out), the residual,
    takes the sum in place. Returns (1, out).
    """
    n, k = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    if x.shape != (1, k) or not weight.is_contiguous():
        raise ValueError(f"one row of {k} and a contiguous weight are needed, x is {list(x.shape)}: too many rows?")
    out = torch.empty(1, n, dtype=x.dtype, device=x.device) if added_to is None else added_to
    _gemv_kernel[(triton.cdiv(n, config.block_n),)](
        x, weight, bias if bias is not None else x, norm if norm is not None else x, out, n, k, eps,
        HAS_BIAS=bias is not None, HAS_NORM=norm is not None, ADDS=added_to is not None, GATED=is_gated,
        EVEN=n % config.block_n == 0 and k % config.block_k == 0, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages, OVERLAPS=overlaps_launches(x),
        PREFETCHES=overlaps_launches(x) and weight.numel() <= MAX_PREFETCHED, num_warps=config.num_warps,
        launch_pdl=overlaps_launches(x),
    )  # fmt: skip
    return out
