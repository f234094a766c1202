"""GEMM of up to 64 rows with adapters, on a GPU: y = x W^T + b + H B, where H B continues the loop over K.

As `skinny_gemm.py` of `kernels/gpu/few_rows`, with the columns of `adapter_columns.py`. If several programs share a
tile's K, these belong to the last one, which has a smaller part of K for it. A row's result does not depend on the
other rows, as in `gated_rows.py`.

Reference: `functional.linear` and `low_rank_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.few_rows.gemm_configs import TileConfig
from kernels.gpu.few_rows.split_k import SplitKWorkspace, reduce_splits
from kernels.gpu.launch import FastLaunch, let_successor_start, overlaps_launches, wait_first
from kernels.gpu.lora.adapter_columns import add_adapters
from kernels.gpu.lora.low_rank import BLOCK_RANKS, SlotWeights
from kernels.gpu.lora.row_tiles import NOTHING, RowTiles
from kernels.gpu.lora.tile_shrink import MAX_ROWS, TILES

BLOCK_N = 64
EXPAND_STAGES = 5
MANY_COLUMNS = 8192  # of x: more programs share them


def gemm_config_of(weights: SlotWeights) -> TileConfig | None:
    """Choose a layer's configuration: enough programs for all multiprocessors. None: the kernel does not take it."""
    k, n = weights.a.shape[3], weights.starts[-1]
    if weights.b.dtype.itemsize != 2 or any(start % BLOCK_N for start in weights.starts[:-1]):
        return None
    programs, num_stages = (224, 3) if k > MANY_COLUMNS else (112, 4)
    split_k = max(1, min(programs // triton.cdiv(n, BLOCK_N), k // 1024))
    return TileConfig(BLOCK_N, 128, split_k, num_stages=num_stages)


@FastLaunch
@triton.jit(do_not_specialize=["M", "num_tiles"])
def _adapted_kernel(
    x_ptr, weight_ptr, bias_ptr, h_ptr, b_ptr, ranks_ptr, tile_of_row_ptr, slots_ptr, out_ptr, partials_ptr,
    counters_ptr, M, N, K, x_stride, second, third, num_tiles,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, MODULES: tl.constexpr, RANK: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_R: tl.constexpr, TILES: tl.constexpr, NUM_STAGES: tl.constexpr, EXPAND_STAGES: tl.constexpr,
    NOTHING: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """second, third: the first outputs of those modules, N if there are fewer; a tile's columns belong to one."""
    let_successor_start(OVERLAPS)  # x is complete, see `tile_shrink`
    tile = tl.program_id(0)
    split = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inside = columns < N
    has_row = (rows < M)[:, None]
    weight_at = weight_ptr + columns.to(tl.int64)[:, None] * K
    x_at = x_ptr + rows[:, None] * x_stride
    num_steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(num_steps + tl.cdiv(num_tiles * BLOCK_R, BLOCK_K), SPLIT_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(split * share, tl.minimum(split * share + share, num_steps), num_stages=NUM_STAGES):
        ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN:
            weight = tl.load(weight_at + ks[None, :])
            x = tl.load(x_at + ks[None, :], mask=has_row, other=0.0)
        else:
            weight = tl.load(weight_at + ks[None, :], mask=inside[:, None] & (ks < K)[None, :], other=0.0)
            x = tl.load(x_at + ks[None, :], mask=has_row & (ks < K)[None, :], other=0.0)
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    wait_first(OVERLAPS)
    if split == SPLIT_K - 1:
        module = (tile * BLOCK_N >= second).to(tl.int32) + (tile * BLOCK_N >= third).to(tl.int32)
        tile_of_row = tl.load(tile_of_row_ptr + rows, mask=rows < M, other=NOTHING)
        total = add_adapters(
            total, h_ptr, b_ptr, ranks_ptr, slots_ptr, tile_of_row, module, rows, columns, inside, M, num_tiles, N,
            MODULES, RANK, BLOCK_T, BLOCK_R, TILES, EXPAND_STAGES,
        )  # fmt: skip
    exists = inside[:, None] & (rows < M)[None, :]
    is_last, total = reduce_splits(total, partials_ptr, counters_ptr, tile, split, exists, SPLIT_K)
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
        at = out_ptr + rows[None, :] * N + columns[:, None]
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=exists)


def adapted_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, weights: SlotWeights, tiles: RowTiles,
    workspace: SplitKWorkspace, config: TileConfig,
) -> Tensor:  # fmt: skip
    """Multiply x (rows <= 64, in), columns of stride 1; weight (out, in), contiguous; bias (out,) -> (rows, out).

    h: of `tile_shrink` for x, the previous launch. Raises ValueError for shapes that do not belong together.
    """
    num_rows, k = x.shape
    n, starts = weight.shape[0], weights.starts
    if num_rows > MAX_ROWS or h.shape[:2] != (len(starts) - 1, num_rows) or starts[-1] != n:
        raise ValueError(f"{num_rows} rows and h {tuple(h.shape)} do not fit adapters that start at {starts}")
    if not weight.is_contiguous() or weight.shape[1] != k or any(each % config.block_n for each in starts[:-1]):
        raise ValueError(f"a contiguous weight of {k} columns is needed, and modules of whole tiles")
    block_m = max(16, triton.next_power_of_2(num_rows))
    num_columns = triton.cdiv(n, config.block_n)
    workspace.check(num_columns, config.block_n * block_m, config.split_k)
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    second, third = (*starts[1:-1], n, n)[:2]
    num_tiles, overlaps = tiles.slots.shape[0], overlaps_launches(x)
    _adapted_kernel[(num_columns, config.split_k)](
        x, weight, x if bias is None else bias, h, weights.b, weights.ranks, tiles.tile_of_row, tiles.slots, out,
        workspace.partials, workspace.counters, num_rows, n, k, x.stride(0), second, third, num_tiles,
        HAS_BIAS=bias is not None, EVEN=n % config.block_n == 0 and k % config.block_k == 0, MODULES=len(starts) - 1,
        RANK=weights.a.shape[2], BLOCK_T=max(TILES, triton.next_power_of_2(num_tiles)), BLOCK_M=block_m,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT_K=config.split_k, BLOCK_R=BLOCK_RANKS, TILES=TILES,
        NUM_STAGES=config.num_stages, EXPAND_STAGES=EXPAND_STAGES, NOTHING=NOTHING, OVERLAPS=overlaps,
        num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out
