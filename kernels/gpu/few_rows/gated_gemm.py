"""Skinny GEMM of gate and up on a GPU: y = silu(x W_gate^T + b_gate) * (x W_up^T + b_up), or with GELU.

As in `skinny_gemm`, a tile of W is the M operand of `tl.dot` and x, padded to a power of two, the N operand. A
program computes the tiles of gate and up for the same columns, so x is read once for both, and neither GEMM's output
is written to memory. Rounded once.

Reference: `functional.linear` and `kernels/elementwise.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.silu_mul import gate_times
from kernels.gpu.few_rows.gemm_configs import TileConfig
from kernels.gpu.launch import overlaps_launches, wait_for_predecessor

MAX_ROWS = 64


@triton.jit
def gate_and_up(
    x_ptr, weight_ptr, rows, columns, M, N, K, x_stride, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Wait for the previous kernel, then multiply x by the rows `columns` of both weights: (BLOCK_N, BLOCK_M) each.

    EVEN: no tile is partial.
    """
    inside = (columns < N)[:, None]
    has_row = (rows < M)[:, None]
    x_rows = x_ptr + rows[:, None] * x_stride
    gate_rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    up_rows = gate_rows + N.to(tl.int64) * K
    wait_for_predecessor(OVERLAPS)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        ks = first + tl.arange(0, BLOCK_K)
        if EVEN:
            x = tl.trans(tl.load(x_rows + ks[None, :], mask=has_row, other=0.0))
            gate = tl.dot(tl.load(gate_rows + ks[None, :]), x, gate, input_precision="ieee")
            up = tl.dot(tl.load(up_rows + ks[None, :]), x, up, input_precision="ieee")
        else:
            exists = inside & (ks < K)[None, :]
            x = tl.trans(tl.load(x_rows + ks[None, :], mask=has_row & (ks < K)[None, :], other=0.0))
            gate = tl.dot(tl.load(gate_rows + ks[None, :], mask=exists, other=0.0), x, gate, input_precision="ieee")
            up = tl.dot(tl.load(up_rows + ks[None, :], mask=exists, other=0.0), x, up, input_precision="ieee")
    return gate, up


@triton.jit(do_not_specialize=["M"])
def _gated_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K, x_stride,
    HAS_BIAS: tl.constexpr, IS_GELU: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inside = (columns < N)[:, None]
    gate, up = gate_and_up(
        x_ptr, weight_ptr, rows, columns, M, N, K, x_stride, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, OVERLAPS
    )
    if HAS_BIAS:
        gate += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + N + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    y = gate_times(gate, up, IS_GELU)
    outputs = rows.to(tl.int64)[None, :] * N + columns[:, None]
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=inside & (rows < M)[None, :])


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: TileConfig, is_gelu: bool = False) -> Tensor:
    """Multiply x (rows <= 64, in), columns of stride 1; weight (2 n, in), contiguous, gate first; bias (2 n,) ->
    (rows, n).

    is_gelu: GELU instead of SiLU, see `silu_mul`.
    """
    num_rows, k = x.shape
    n = weight.shape[0] // 2
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows are too many")
    if not weight.is_contiguous() or weight.shape[1] != k:
        raise ValueError(f"a contiguous weight of {k} columns is needed")
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    overlaps = overlaps_launches(x)
    _gated_kernel[(triton.cdiv(n, config.block_n),)](
        x, weight, bias if bias is not None else x, out, num_rows, n, k, x.stride(0),
        HAS_BIAS=bias is not None, IS_GELU=is_gelu, EVEN=n % config.block_n == 0 and k % config.block_k == 0,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)), BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages, OVERLAPS=overlaps, num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out
