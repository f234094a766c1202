"""Prefill attention over latents (MLA) in the paged pool on a GPU: chunks of queries over all latents up to them.

As `kernels/gpu/attention/paged_prefill.py`, for the absorbed form of `kernels/gpu/mla/latent_decode.py`: a program
computes TILE_M consecutive rows of (token, head), which all read the same latents. For a long context, expanding keys
and values once would take fewer operations than absorbed queries; this kernel reads only the pool.

Reference: `attend_causally` of `kernels/paged_attention.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.decode_tiles import LOG2_E, compute_dtype, tile_offsets
from kernels.gpu.mla.latent_decode import check_latents
from kernels.gpu.mla.latent_tuning import LATENT_PREFILL, LATENT_PREFILL_FOUR_BYTES
from kernels.gpu.tuning import PrefillConfig

TILE_M = 64  # rows of (token, head) per program: their sums of `rank` numbers fill its registers


@triton.jit(do_not_specialize=["layer"])
def _latent_prefill_kernel(
    q_ptr, pool_ptr, tables_ptr, tiles_ptr, out_ptr,
    layer, q_stride, table_stride, block_stride, layer_stride, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, NUM_STAGES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """GROUP: heads per program; other programs compute the rest."""
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    row = tl.load(tile_ptr).to(tl.int64)
    first_token = tl.load(tile_ptr + 1)
    first_position = tl.load(tile_ptr + 2)
    count = tl.load(tile_ptr + 3)

    WIDTH: tl.constexpr = RANK + ROTATED
    members = tl.arange(0, TILE_M)
    dims, rotated = tl.arange(0, RANK), RANK + tl.arange(0, ROTATED)
    heads = tl.program_id(0) * GROUP + members % GROUP
    exists = ((members < count * GROUP) & (heads < NUM_HEADS))[:, None]
    tokens = (first_token + members // GROUP).to(tl.int64)
    q_at = q_ptr + tokens[:, None] * q_stride + heads[:, None] * WIDTH
    q = tl.load(q_at + dims[None, :], mask=exists, other=0.0).to(COMPUTE)
    q_rotated = tl.load(q_at + rotated[None, :], mask=exists, other=0.0).to(COMPUTE)
    positions = first_position + tl.minimum(members // GROUP, count - 1)
    keys_ptr = pool_ptr + layer.to(tl.int64) * layer_stride
    table_ptr = tables_ptr + row * table_stride

    highest = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    mixed = tl.zeros((TILE_M, RANK), tl.float32)
    end_key = first_position + count
    for first in tl.range(0, end_key, TILE_N, num_stages=NUM_STAGES):
        offsets = tile_offsets(table_ptr, first, end_key, block_stride, BLOCK_SIZE, TILE_N, WIDTH)
        seen = first + tl.arange(0, TILE_N)
        # Unwritten memory after the last key may hold NaN, and 0 * NaN is NaN.
        is_there = (seen < end_key)[:, None]
        latents = tl.load(keys_ptr + offsets[:, None] + dims[None, :], mask=is_there, other=0.0).to(COMPUTE)
        keys = tl.load(keys_ptr + offsets[:, None] + rotated[None, :], mask=is_there, other=0.0).to(COMPUTE)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(keys), scores, input_precision="ieee") * scale
        scores = tl.where(seen[None, :] <= positions[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(COMPUTE), latents, mixed * shrink[:, None], input_precision="ieee")
        highest = new_highest
    mixed = mixed / tl.maximum(total, 1.0)[:, None]  # the highest score has weight 1; a tile without tokens has none
    target = out_ptr + (tokens[:, None] * NUM_HEADS + heads[:, None]) * RANK + dims[None, :]
    tl.store(target, mixed.to(out_ptr.dtype.element_ty), mask=exists)


def heads_of_tile(num_heads: int) -> int:
    """Return how many heads of a token are in a tile, which is the group of `prefill_tiles`."""
    return min(num_heads, TILE_M)


def latent_prefill(
    q: Tensor, pool: Tensor, rank: int, scale: float, layer: int, block_tables: Tensor, tiles: Tensor,
    out: Tensor | None = None, config: PrefillConfig | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention for the tokens in `tiles`: int32 (num_tiles, 4), from `prefill_tiles` with `heads_of_tile`.

    q: (num_tokens, num_heads, width), heads contiguous, tokens of any stride. pool, rank and scale: see
    `latent_decode`. block_tables: int32 (num_rows, any). out: (num_tokens, num_heads * rank), contiguous; tokens in
    no tile are not written. Returns it.
    """
    num_tokens, num_heads, width = q.shape
    check_latents(pool, rank, width)
    if out is None:
        out = torch.empty(num_tokens, num_heads * rank, dtype=q.dtype, device=q.device)
    if tiles.shape[0] == 0:
        return out
    config = config or (LATENT_PREFILL if pool.itemsize <= 2 else LATENT_PREFILL_FOUR_BYTES)
    group = heads_of_tile(num_heads)
    _latent_prefill_kernel[(triton.cdiv(num_heads, group), tiles.shape[0])](
        q, pool, block_tables, tiles, out,
        layer, q.stride(0), block_tables.stride(0), pool.stride(0), pool.stride(1), LOG2_E * scale,
        NUM_HEADS=num_heads, GROUP=group, RANK=rank, ROTATED=width - rank, BLOCK_SIZE=pool.shape[4],
        TILE_M=TILE_M, TILE_N=config.tile_n, NUM_STAGES=config.num_stages, COMPUTE=compute_dtype(q, pool),
        num_warps=config.num_warps,
    )  # fmt: skip
    return out
