"""Shrink for GEMMs that continue over adapters, on a GPU: h of each row, placed among the columns of all tiles.

    H[m, i, b, t, r] = sum_k A[s_t, m, 16 b + r, k] x[i, k] if row i is in tile t, else 0

With H as more columns of x, and the tiles' B as more columns of W, adapters are the end of a GEMM's loop over K
(`adapter_columns.py`). Several programs share a tile's K; the last one to finish adds up their sums in order.

The GEMM may start as soon as these programs have started, since x is complete then. It runs at the same time, and
waits for H where it needs it. So nothing may be launched in between.

Reference: `low_rank_reference`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.few_rows.split_k import SplitKWorkspace, reduce_splits
from kernels.gpu.launch import FastLaunch, let_successor_start, overlaps_launches, wait_first
from kernels.gpu.lora.few_rows import dot_of_tile
from kernels.gpu.lora.low_rank import BLOCK_RANKS, SlotWeights
from kernels.gpu.lora.row_tiles import BLOCK_ROWS, RowTiles, num_tiles

MAX_ROWS = 64  # of a step: of the shrink, and of the GEMM that follows
TILES = 4  # written, and multiplied, at a time


class TileShrinkConfig(NamedTuple):
    """block_k: columns of x at a time. split: columns per program."""

    block_k: int
    split: int
    num_warps: int
    num_stages: int


def shrink_config_of(weights: SlotWeights) -> TileShrinkConfig:
    """Choose a layer's configuration. Measured with Qwen2.5-7B's layers, each with its GEMM: see the log."""
    if weights.a.shape[3] > 8192:
        return TileShrinkConfig(128, 4096, num_warps=2, num_stages=4)
    return TileShrinkConfig(256, 1024 if weights.a.shape[1] == 1 else 2048, num_warps=4, num_stages=3)


def shrink_workspace(layers: Iterable[SlotWeights], device: torch.device) -> SplitKWorkspace:
    """Allocate a workspace for `tile_shrink` of each of these layers."""
    num_parts, num_floats = 1, 1
    for weights in layers:
        slots, modules, rank, k = weights.a.shape
        parts = num_tiles(MAX_ROWS, slots) * modules * triton.cdiv(rank, BLOCK_RANKS)
        splits = triton.cdiv(k, shrink_config_of(weights).split)
        num_parts = max(num_parts, parts)
        num_floats = max(num_floats, parts * splits * BLOCK_ROWS * BLOCK_RANKS)
    return SplitKWorkspace(device, num_floats, num_parts)


@FastLaunch
@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _tile_shrink_kernel(
    x_ptr, a_ptr, ranks_ptr, rows_ptr, slots_ptr, h_ptr, partials_ptr, counters_ptr, K, num_rows, num_tiles, x_stride,
    MODULES: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, NUM_SPLITS: tl.constexpr, TILES: tl.constexpr, NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    module = part % MODULES
    block = part // MODULES
    slot = tl.load(slots_ptr + tile)
    rank = 0
    if slot >= 0:
        rank = tl.load(ranks_ptr + slot * MODULES + module)
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    within = tl.arange(0, BLOCK_R)
    ranks = block * BLOCK_R + within
    begin = tl.program_id(2) * SPLIT
    wait_first(OVERLAPS)
    let_successor_start(OVERLAPS)
    if slot < 0:
        return
    has_row = (rows >= 0)[:, None]
    stop = tl.where(block * BLOCK_R < rank, K, begin)  # without such ranks H is zero
    total = dot_of_tile(
        x_ptr + rows.to(tl.int64)[:, None] * x_stride,
        a_ptr + ((slot.to(tl.int64) * MODULES + module) * RANK + ranks)[:, None] * K,
        has_row, (ranks < rank)[:, None], begin, stop, BLOCK_M, BLOCK_R, BLOCK_K, SPLIT, NUM_STAGES,
    )  # fmt: skip
    is_last, total = reduce_splits(
        total, partials_ptr, counters_ptr, tile * tl.num_programs(1) + part, tl.program_id(2), has_row, NUM_SPLITS
    )
    if is_last:
        h = total.to(h_ptr.dtype.element_ty)[:, None, :]
        num_blocks, padded = tl.num_programs(1) // MODULES, tl.cdiv(num_tiles, TILES) * TILES
        row_at = h_ptr + ((module * num_rows + rows).to(tl.int64) * num_blocks + block) * (padded * BLOCK_R)
        for first in range(0, num_tiles, TILES):
            tiles = first + tl.arange(0, TILES)[None, :, None]
            own = tl.where(tiles == tile, h, 0.0)
            tl.store(row_at[:, None, None] + tiles * BLOCK_R + within[None, None, :], own, mask=has_row[:, :, None])


def tile_shrink(
    x: Tensor, weights: SlotWeights, tiles: RowTiles, workspace: SplitKWorkspace,
    config: TileShrinkConfig | None = None,
) -> Tensor:  # fmt: skip
    """Return H (num_modules, n, blocks of 16 ranks, num_tiles, 16) in the weights' dtype, for rows x (n, in).

    The number of tiles is padded to a multiple of TILES. Only rows with an adapter are written. workspace: another
    one than that of the GEMM that follows. Raises ValueError for shapes that do not belong together.
    """
    config = config or shrink_config_of(weights)
    _, modules, rank, k = weights.a.shape
    num_rows = x.shape[0]
    if x.shape[1] != k or x.stride(1) != 1:
        raise ValueError(
            f"x {tuple(x.shape)} does not fit a {tuple(weights.a.shape)}, or its rows are not contiguous"
        )
    splits, blocks = triton.cdiv(k, config.split), triton.cdiv(rank, BLOCK_RANKS)
    num_tiles = tiles.slots.shape[0]
    padded = triton.cdiv(num_tiles, TILES) * TILES
    workspace.check(num_tiles * modules * blocks, BLOCK_ROWS * BLOCK_RANKS, splits)
    h = torch.empty(modules, num_rows, blocks, padded, BLOCK_RANKS, dtype=weights.b.dtype, device=x.device)
    overlaps = overlaps_launches(x)
    _tile_shrink_kernel[(num_tiles, modules * blocks, splits)](
        x, weights.a, weights.ranks, tiles.rows, tiles.slots, h, workspace.partials, workspace.counters,
        k, num_rows, num_tiles, x.stride(0),
        MODULES=modules, RANK=rank, BLOCK_M=BLOCK_ROWS, BLOCK_R=BLOCK_RANKS, BLOCK_K=config.block_k,
        SPLIT=config.split, NUM_SPLITS=splits, TILES=TILES, NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return h
