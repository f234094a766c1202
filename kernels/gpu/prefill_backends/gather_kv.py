"""Gathers K and V of several sequences of one layer from the paged pool into contiguous memory.

For attention kernels that do not support block tables. One launch copies K and V of all KV heads; slots of a tile's
last block after the sequence's end are not copied.

Reference: `gather_kv` of `kernels/paged_attention.py`, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import FastLaunch

TILE = 64  # tokens per program, of one head: 16 KB at head_dim 128


def gather_tiles(seq_lens: Sequence[int], tile: int = TILE) -> list[tuple[int, int, int, int]]:
    """Return the programs' work: (row, first token of the sequence, its place in the output, tokens), row by row."""
    tiles = []
    place = 0
    for row, seq_len in enumerate(seq_lens):
        tiles += [(row, first, place + first, min(tile, seq_len - first)) for first in range(0, seq_len, tile)]
        place += seq_len
    return tiles


@FastLaunch
@triton.jit(do_not_specialize=["layer"])
def _gather_kv_kernel(
    pool_ptr, tables_ptr, tiles_ptr, out_ptr, layer, table_stride, block_stride, layer_stride, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    head = tl.program_id(1).to(tl.int64)  # K heads, then V heads
    row = tl.load(tile_ptr).to(tl.int64)
    first = tl.load(tile_ptr + 1)
    place = tl.load(tile_ptr + 2).to(tl.int64)
    count = tl.load(tile_ptr + 3)
    members = tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_DIM)
    exists = members < count
    tokens = first + members
    blocks = tl.load(tables_ptr + row * table_stride + tokens // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    source = blocks * block_stride + layer.to(tl.int64) * layer_stride + head * (BLOCK_SIZE * HEAD_DIM)
    source += (tokens % BLOCK_SIZE) * HEAD_DIM
    mask = exists[:, None]
    values = tl.load(pool_ptr + source[:, None] + dims[None, :], mask=mask)
    target = out_ptr + head * head_stride + (place + members)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, values.to(out_ptr.dtype.element_ty), mask=mask)


def gather_kv(pool: Tensor, layer: int, block_tables: Tensor, tiles: Tensor, out: Tensor, tile: int = TILE) -> Tensor:
    """Copy the tokens in `tiles`, converted to out's dtype.

    pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), contiguous; head_dim a power of two.
    block_tables: int32 (num_rows, any). tiles: int32 (num_tiles, 4), from `gather_tiles` with the same tile. out: (2,
    num_kv_heads, capacity, head_dim), contiguous. Returns it.
    """
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    if tiles.shape[0]:
        _gather_kv_kernel[(tiles.shape[0], 2 * num_kv_heads)](
            pool, block_tables, tiles, out,
            layer, block_tables.stride(0), pool.stride(0), pool.stride(1), out.stride(1),
            HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=tile, num_warps=4,
        )  # fmt: skip
    return out
