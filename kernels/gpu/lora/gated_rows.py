"""GEMM of gate and up with adapters for up to 64 rows, on a GPU:

    y = silu(x W_gate^T + H_gate B_gate) * (x W_up^T + H_up B_up), or with GELU

`gated_gemm.py` of `kernels/gpu/few_rows`, whose loop over K continues over the adapters of all rows
(`adapter_columns.py`). So neither the outputs of gate and up nor what adapters add to them is written to memory.

A row's result does not depend on the other rows, since zeros change no sum. That needs finite weights, which loading
an adapter checks.

Reference: `functional.linear`, `low_rank_reference` and `kernels/elementwise.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.silu_mul import gate_times
from kernels.gpu.few_rows.gated_gemm import gate_and_up
from kernels.gpu.launch import FastLaunch, let_successor_start, overlaps_launches, wait_first
from kernels.gpu.lora.adapter_columns import add_adapters
from kernels.gpu.lora.low_rank import BLOCK_RANKS, SlotWeights
from kernels.gpu.lora.row_tiles import NOTHING, RowTiles
from kernels.gpu.lora.tile_shrink import MAX_ROWS, TILES

MIN_COLUMNS = 12288  # of gate: with fewer there are too few programs
BLOCK_N, BLOCK_K, NUM_STAGES = 64, 64, 3
EXPAND_STAGES = 3
MAX_REGISTERS = 168  # so that three programs fit into a multiprocessor


@FastLaunch
@triton.jit(do_not_specialize=["M", "num_tiles"])
def _gated_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, h_ptr, b_ptr, ranks_ptr, tile_of_row_ptr, slots_ptr, out_ptr, M, N, K, x_stride,
    num_tiles, HAS_BIAS: tl.constexpr, IS_GELU: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, TILES: tl.constexpr, NUM_STAGES: tl.constexpr, EXPAND_STAGES: tl.constexpr,
    NOTHING: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    let_successor_start(OVERLAPS)  # x is complete, see `tile_shrink`
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inside = columns < N
    gate, up = gate_and_up(
        x_ptr, weight_ptr, rows, columns, M, N, K, x_stride, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        OVERLAPS=False,  # without its wait, which comes later
    )  # fmt: skip
    if HAS_BIAS:
        gate += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + N + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    tile_of_row = tl.load(tile_of_row_ptr + rows, mask=rows < M, other=NOTHING)
    wait_first(OVERLAPS)
    gate = add_adapters(
        gate, h_ptr, b_ptr, ranks_ptr, slots_ptr, tile_of_row, 0, rows, columns, inside, M, num_tiles, 2 * N,
        2, RANK, BLOCK_T, BLOCK_R, TILES, EXPAND_STAGES,
    )  # fmt: skip
    up = add_adapters(
        up, h_ptr, b_ptr + N, ranks_ptr, slots_ptr, tile_of_row, 1, rows, columns, inside, M, num_tiles, 2 * N,
        2, RANK, BLOCK_T, BLOCK_R, TILES, EXPAND_STAGES,
    )  # fmt: skip
    y = gate_times(gate, up, IS_GELU)
    outputs = rows.to(tl.int64)[None, :] * N + columns[:, None]
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (rows < M)[None, :])


def takes_gated_rows(num_rows: int, weights: SlotWeights) -> bool:
    """Whether `gated_rows` is the faster way for a step of `num_rows` rows."""
    is_wide = weights.b.shape[2] >= 2 * MIN_COLUMNS and weights.b.dtype.itemsize == 2
    return num_rows <= MAX_ROWS and is_wide


def gated_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, weights: SlotWeights, tiles: RowTiles,
    is_gelu: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply x (rows <= 64, in), columns of stride 1; weight (2 n, in), contiguous, gate first; bias (2 n,) ->
    (rows, n), with what adapters add before the activation.

    h: of `tile_shrink` for x, the previous launch. is_gelu: GELU instead of SiLU. Raises ValueError for shapes that
    do not belong together.
    """
    num_rows, k = x.shape
    n = weight.shape[0] // 2
    if num_rows > MAX_ROWS or h.shape[:2] != (2, num_rows) or weights.starts != (0, n, 2 * n):
        raise ValueError(f"{num_rows} rows and h {tuple(h.shape)} do not fit adapters that start at {weights.starts}")
    if not weight.is_contiguous() or weight.shape[1] != k:
        raise ValueError(f"a contiguous weight of {k} columns is needed")
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    overlaps = overlaps_launches(x)
    num_tiles = tiles.slots.shape[0]
    block_t = max(TILES, triton.next_power_of_2(num_tiles))
    _gated_rows_kernel[(triton.cdiv(n, BLOCK_N),)](
        x, weight, bias if bias is not None else x, h, weights.b, weights.ranks, tiles.tile_of_row, tiles.slots, out,
        num_rows, n, k, x.stride(0), num_tiles,
        HAS_BIAS=bias is not None, IS_GELU=is_gelu, EVEN=n % BLOCK_N == 0 and k % BLOCK_K == 0,
        RANK=weights.a.shape[2], BLOCK_T=block_t, BLOCK_M=max(16, triton.next_power_of_2(num_rows)), BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K, BLOCK_R=BLOCK_RANKS, TILES=TILES, NUM_STAGES=NUM_STAGES, EXPAND_STAGES=EXPAND_STAGES,
        NOTHING=NOTHING, OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return out
