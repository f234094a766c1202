"""MLA's processing of a token between GEMMs and attention, in one kernel: rotate, norm, store.

    out_h[rank:] = rotated q_h         the last numbers of each head's query, after its absorbed ones
    pool        <- [norm(c) | rotated k_rope]

Reference: `LatentAttention.rotated` of `engine/mla/latent_attention.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import overlaps_launches, wait_for_predecessor
from kernels.gpu.mla.latent_decode import check_latents


@triton.jit(do_not_specialize=["layer"])
def _latent_rope_kernel(
    q_ptr, latents_ptr, norm_ptr, table_ptr, positions_ptr, slots_ptr, out_ptr, pool_ptr,
    layer, q_stride, latents_stride, block_stride, layer_stride, eps,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTATED: tl.constexpr, RANK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program per token. PLAIN: numbers of a query before the rotated ones. HEADS: padded."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    HALF: tl.constexpr = ROTATED // 2
    WIDTH: tl.constexpr = RANK + ROTATED
    half, dims = tl.arange(0, HALF), tl.arange(0, RANK)
    row = table_ptr + position * (2 * ROTATED) + half
    cos = tl.load(row).to(tl.float32)
    sin = tl.load(row + ROTATED + HALF).to(tl.float32)
    weight = tl.load(norm_ptr + dims).to(tl.float32)
    wait_for_predecessor(OVERLAPS)

    heads = tl.arange(0, HEADS)[:, None]
    exists = heads < NUM_HEADS
    q_at = q_ptr + token * q_stride + heads * (PLAIN + ROTATED) + PLAIN + half[None, :]
    first = tl.load(q_at, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(q_at + HALF, mask=exists, other=0.0).to(tl.float32)
    out_at = out_ptr + (token * NUM_HEADS + heads) * WIDTH + RANK + half[None, :]
    kind = out_ptr.dtype.element_ty
    tl.store(out_at, (first * cos[None, :] - second * sin[None, :]).to(kind), mask=exists)
    tl.store(out_at + HALF, (second * cos[None, :] + first * sin[None, :]).to(kind), mask=exists)

    if slot >= 0:
        latents_at = latents_ptr + token * latents_stride
        latents = tl.load(latents_at + dims).to(tl.float32)
        normed = latents * tl.rsqrt(tl.sum(latents * latents, axis=0) / RANK + eps) * weight
        key = tl.load(latents_at + RANK + half).to(tl.float32)
        other = tl.load(latents_at + RANK + HALF + half).to(tl.float32)
        kept = pool_ptr + (slot // BLOCK_SIZE) * block_stride + layer.to(tl.int64) * layer_stride
        kept += (slot % BLOCK_SIZE) * WIDTH
        stored = pool_ptr.dtype.element_ty
        tl.store(kept + dims, normed.to(stored))
        tl.store(kept + RANK + half, (key * cos - other * sin).to(stored))
        tl.store(kept + RANK + HALF + half, (other * cos + key * sin).to(stored))


def rotate_and_write_latents(
    q: Tensor, latents: Tensor, norm: Tensor, eps: float, table: Tensor, positions: Tensor, slots: Tensor,
    out: Tensor, pool: Tensor, layer: int,
) -> None:  # fmt: skip
    """Rotate queries, and norm, rotate and store latents.

    q: (num_tokens, num_heads, plain + rotated), heads contiguous, tokens of any stride; read-only.
    latents: (num_tokens, rank + rotated), before the norm, rows of any stride. norm: (rank,).
    table: (num_positions, 2, rotated), see `rotary_table`.
    positions, slots: int (num_tokens,), as for `rope_and_write_kv`.
    out: (num_tokens, num_heads, rank + rotated), contiguous; its end gets the rotated queries.
    pool: (num_blocks, num_layers, 1, 1, block_size, rank + rotated).
    """
    num_tokens, num_heads, qk_dim = q.shape
    rank, width, rotated = norm.shape[0], out.shape[2], table.shape[2]
    check_latents(pool, rank, width)
    if not (out.is_contiguous() and table.is_contiguous() and width == rank + rotated):
        raise ValueError(f"queries of {width} numbers, latents of {rank}, {rotated} rotated: they do not fit")
    if num_tokens == 0:
        return
    overlaps = overlaps_launches(q)
    _latent_rope_kernel[(num_tokens,)](
        q, latents, norm, table, positions, slots, out, pool,
        layer, q.stride(0), latents.stride(0), pool.stride(0), pool.stride(1), eps,
        NUM_HEADS=num_heads, HEADS=triton.next_power_of_2(num_heads), PLAIN=qk_dim - rotated, ROTATED=rotated,
        RANK=rank, BLOCK_SIZE=pool.shape[4], OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps,
    )  # fmt: skip
