"""Decode attention over latents (MLA) in the paged pool on a GPU: one query per sequence, all heads share the keys.

    out_h = softmax(scale q_h K^T) L      K = [L | R]: latents of `rank` numbers, then rotated keys

In the absorbed form a key's first `rank` numbers are also its value, so each is read once for scores and output. The
heads, padded to 16, are the M of `tl.dot`. Programs share keys as in `kernels/gpu/attention/paged_decode.py`.

Reference: `attend_causally` of `kernels/paged_attention.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.decode_plan import DecodePlan, make_plan, num_programs
from kernels.gpu.attention.decode_tiles import (
    LISTED_BLOCKS,
    LOG2_E,
    compute_dtype,
    listed_blocks,
    listed_offsets,
    padded_group,
    tile_offsets,
)
from kernels.gpu.attention.kv_splits import DecodeWorkspace, combine, partial_slot
from kernels.gpu.attention.paged_decode import planned
from kernels.gpu.launch import FastLaunch, overlaps_launches, wait_for_predecessor
from kernels.gpu.mla.latent_tuning import LATENT_DECODE, LATENT_DECODE_FOUR_BYTES

MAX_HEADS = 64  # heads per program; more are divided into groups, each of which reads the keys


@triton.jit
def _attend_latents(
    q, q_rotated, mixed, totals, highest, keys_ptr, table_ptr, ids, first_block, start, stop, length, block_stride,
    scale,
    IS_LISTED: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Add tiles [start, stop) to a running softmax. totals: (heads, TILE), whose columns are summed at the end.

    IS_LISTED: `ids` are those of the blocks from first_block on.
    """
    WIDTH: tl.constexpr = RANK + ROTATED
    dims, rotated = tl.arange(0, RANK), RANK + tl.arange(0, ROTATED)
    for tile in tl.range(start, stop, num_stages=NUM_STAGES):
        if IS_LISTED:
            offsets = listed_offsets(ids, first_block, tile * TILE, block_stride, BLOCK_SIZE, TILE, WIDTH)
        else:
            offsets = tile_offsets(table_ptr, tile * TILE, length, block_stride, BLOCK_SIZE, TILE, WIDTH)
        visible = tile * TILE + tl.arange(0, TILE) < length
        # Blocks may hold anything beyond the length, and 0 * NaN is NaN: those rows are read as zeros.
        latents = tl.load(keys_ptr + offsets[:, None] + dims[None, :], mask=visible[:, None], other=0.0).to(q.dtype)
        keys = tl.load(keys_ptr + offsets[:, None] + rotated[None, :], mask=visible[:, None], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(keys), scores, input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        totals = totals * shrink[:, None] + weights
        mixed = tl.dot(weights.to(q.dtype), latents, mixed * shrink[:, None], input_precision="ieee")
        highest = new_highest
    return mixed, totals, highest


@triton.jit
def _attend_row(
    q, q_rotated, keys_ptr, table_ptr, ids, first_tile, end_tile, length, block_stride, scale,
    RANK: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the running softmax of tiles [first_tile, end_tile), at least one: (mixed, total, highest), not
    divided.

    ids: of the first LISTED_BLOCKS blocks, read ahead.
    """
    PADDED: tl.constexpr = q.shape[0]
    highest = tl.full((PADDED,), float("-inf"), tl.float32)
    totals = tl.zeros((PADDED, TILE), tl.float32)
    mixed = tl.zeros((PADDED, RANK), tl.float32)
    first_block = first_tile * TILE // BLOCK_SIZE
    if BLOCK_SIZE >= TILE:
        per_block: tl.constexpr = BLOCK_SIZE // TILE
        for block in tl.range(first_block, tl.cdiv(end_tile * TILE, BLOCK_SIZE), LISTED_BLOCKS):
            start = tl.maximum(block * per_block, first_tile)
            stop = tl.minimum((block + LISTED_BLOCKS) * per_block, end_tile)
            mixed, totals, highest = _attend_latents(
                q, q_rotated, mixed, totals, highest, keys_ptr, table_ptr, ids, block, start, stop, length,
                block_stride, scale, True, RANK, ROTATED, BLOCK_SIZE, TILE, NUM_STAGES,
            )  # fmt: skip
            ids = listed_blocks(table_ptr, block + LISTED_BLOCKS, length, BLOCK_SIZE)
    else:
        mixed, totals, highest = _attend_latents(
            q, q_rotated, mixed, totals, highest, keys_ptr, table_ptr, ids, first_block, first_tile, end_tile, length,
            block_stride, scale, False, RANK, ROTATED, BLOCK_SIZE, TILE, NUM_STAGES,
        )  # fmt: skip
    return mixed, tl.sum(totals, axis=1), highest


@FastLaunch
@triton.jit(do_not_specialize=["layer"])
def _latent_decode_kernel(
    q_ptr, pool_ptr, tables_ptr, lengths_ptr, programs_ptr, out_ptr, outputs_ptr, log_sums_ptr,
    layer, q_stride, table_stride, block_stride, layer_stride, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1)
    first_row, last_row, taken, left, length = planned(programs_ptr, program)
    keys_ptr = pool_ptr + layer.to(tl.int64) * layer_stride
    table_ptr = tables_ptr + first_row * table_stride
    ids = listed_blocks(table_ptr, taken * TILE // BLOCK_SIZE, length, BLOCK_SIZE)
    wait_for_predecessor(OVERLAPS)

    WIDTH: tl.constexpr = RANK + ROTATED
    members = tl.arange(0, PADDED)
    heads = tl.program_id(0) * GROUP + members
    is_member = (members < GROUP) & (heads < NUM_HEADS)
    dims, rotated = tl.arange(0, RANK), RANK + tl.arange(0, ROTATED)
    for row in tl.range(first_row, last_row + 1, num_stages=1):
        num_tiles = tl.cdiv(length, TILE)
        num_mine = tl.minimum(left, num_tiles - taken)
        q_at = q_ptr + row * q_stride + heads[:, None] * WIDTH
        q = tl.load(q_at + dims[None, :], mask=is_member[:, None], other=0.0).to(COMPUTE)
        q_rotated = tl.load(q_at + rotated[None, :], mask=is_member[:, None], other=0.0).to(COMPUTE)
        mixed, total, highest = _attend_row(
            q, q_rotated, keys_ptr, table_ptr, ids, taken, taken + num_mine, length, block_stride, scale,
            RANK, ROTATED, BLOCK_SIZE, TILE, NUM_STAGES,
        )  # fmt: skip
        # There may be rows without keys between others.
        mixed = mixed * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
        if num_mine == num_tiles:
            out_at = out_ptr + (row * NUM_HEADS + heads)[:, None] * RANK
            tl.store(out_at + dims[None, :], mixed.to(out_ptr.dtype.element_ty), mask=is_member[:, None])
        else:
            places = partial_slot(program, taken).to(tl.int64) * NUM_HEADS + heads
            tl.store(outputs_ptr + places[:, None] * RANK + dims[None, :], mixed, mask=is_member[:, None])
            tl.store(log_sums_ptr + places, highest + tl.log2(total), mask=is_member)
        left -= num_mine
        taken = 0
        length = tl.load(lengths_ptr + row + 1, mask=row < last_row, other=0).to(tl.int32)
        table_ptr += table_stride
        ids = listed_blocks(table_ptr, 0, length, BLOCK_SIZE)


def check_latents(pool: Tensor, rank: int, width: int) -> None:
    """Raise ValueError for a pool of something else, or for sizes that the kernels do not support."""
    if pool.shape[2:4] != (1, 1) or pool.shape[5] != width or not rank < width:
        raise ValueError(f"a pool of latents of {width} numbers is needed, blocks are {list(pool.shape[2:])}")
    if rank & (rank - 1) or (width - rank) & (width - rank - 1):
        raise ValueError(f"latents of {rank} and {width - rank} numbers: powers of two are needed")


def latent_workspace(max_rows: int, num_heads: int, rank: int, device: torch.device) -> DecodeWorkspace:
    """Return a workspace for launches of at most `max_rows` rows."""
    num_groups = triton.cdiv(num_heads, MAX_HEADS)
    programs = max(num_programs(num_groups, device, each) for each in (LATENT_DECODE, LATENT_DECODE_FOUR_BYTES))
    return DecodeWorkspace(max_rows, num_heads, 1, rank, device, programs=programs)


def plan_latents(lengths: Tensor, num_heads: int, itemsize: int) -> DecodePlan:
    """Plan launches over a pool of `itemsize` bytes per number, for rows of these lengths, see `make_plan`."""
    config = LATENT_DECODE if itemsize <= 2 else LATENT_DECODE_FOUR_BYTES
    return make_plan(lengths, config, num_programs(triton.cdiv(num_heads, MAX_HEADS), lengths.device, config))


def latent_decode(
    q: Tensor, pool: Tensor, rank: int, scale: float, layer: int, block_tables: Tensor, lengths: Tensor,
    plan: DecodePlan, workspace: DecodeWorkspace,
) -> Tensor:  # fmt: skip
    """Compute attention of one query per row; capture and inputs are as for `paged_decode`.

    q: (num_rows, num_heads, width), heads contiguous, rows of any stride. rank and width - rank are powers of two.
    pool: (num_blocks, num_layers, 1, 1, block_size, width). plan: `plan_latents` of the lengths. workspace: of
    `latent_workspace`.
    Returns (num_rows, num_heads * rank).
    """
    num_rows, num_heads, width = q.shape
    block_size, config = pool.shape[4], plan.config
    check_latents(pool, rank, width)
    out = torch.empty(num_rows, num_heads * rank, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    group = min(num_heads, MAX_HEADS)
    workspace.check(plan, num_heads)
    overlaps = overlaps_launches(q)
    _latent_decode_kernel[(triton.cdiv(num_heads, group), plan.num_programs)](
        q, pool, block_tables, lengths, plan.of_programs, out, workspace.outputs, workspace.log_sums,
        layer, q.stride(0), block_tables.stride(0), pool.stride(0), pool.stride(1),
        LOG2_E * scale,
        NUM_HEADS=num_heads, GROUP=group, PADDED=padded_group(group), RANK=rank, ROTATED=width - rank,
        BLOCK_SIZE=block_size, TILE=config.tile, NUM_STAGES=config.num_stages, COMPUTE=compute_dtype(q, pool),
        OVERLAPS=overlaps, num_warps=config.num_warps * (1 if group <= 16 else 2), launch_pdl=overlaps,
    )  # fmt: skip
    combine(plan, out, workspace, 1)
    return out
