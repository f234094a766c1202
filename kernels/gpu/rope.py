"""What lies between the q/k/v product and attention, in one pass: QK-norm, rotary embedding, KV write.

For every head x of q and k:  x = rms_norm(x) * weight (when the model has QK-norm), then
x * cos + (second half, first half) * sin with the position's row of the table, sin carrying the rotation's sign.
q and k go back to where they were; k and v go to their slot of the paged pool. Computed in float32, rounded once.

In the pool's layout (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim) the k heads and then the v heads
of a layer lie one after the other, as they do in qkv, so one index covers both.

Reference: `rope_reference` below, from `kernels/rms_norm.py`, `kernels/rotary.py` and `write_kv`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import overlaps_launches, wait_for_predecessor
from kernels.paged_attention import write_kv
from kernels.rms_norm import rms_norm
from kernels.rotary import rotate_


@triton.jit(do_not_specialize=["layer"])
def _rope_kernel(
    qkv_ptr, table_ptr, positions_ptr, slots_ptr, norm_ptr, pool_ptr,
    layer, token_stride, block_stride, layer_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    exists = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    rotates = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]

    source = qkv_ptr + token * token_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    first = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=exists, other=0.0).to(tl.float32)
    row = table_ptr + position * (2 * HEAD_DIM) + dims[None, :]
    cos_first = tl.load(row).to(tl.float32)
    cos_second = tl.load(row + HALF).to(tl.float32)
    sin_first = tl.load(row + HEAD_DIM).to(tl.float32)
    sin_second = tl.load(row + HEAD_DIM + HALF).to(tl.float32)

    x, y = first, second
    if HAS_NORM:
        square = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        weight = norm_ptr + heads[:, None] * HEAD_DIM + dims[None, :]
        x = x * scale * tl.load(weight, mask=rotates, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight + HALF, mask=rotates, other=0.0).to(tl.float32)
    out_first = tl.where(rotates, x * cos_first + y * sin_first, first)
    out_second = tl.where(rotates, y * cos_second + x * sin_second, second)

    tl.store(source, out_first.to(qkv_ptr.dtype.element_ty), mask=rotates)
    tl.store(source + HALF, out_second.to(qkv_ptr.dtype.element_ty), mask=rotates)
    target = pool_ptr + (slot // BLOCK_SIZE) * block_stride + layer.to(tl.int64) * layer_stride
    target += (slot % BLOCK_SIZE) * HEAD_DIM
    target = target + (heads - NUM_HEADS)[:, None] * (BLOCK_SIZE * HEAD_DIM) + dims[None, :]
    is_kv = exists & (heads >= NUM_HEADS)[:, None] & (slot >= 0)
    tl.store(target, out_first.to(pool_ptr.dtype.element_ty), mask=is_kv)
    tl.store(target + HALF, out_second.to(pool_ptr.dtype.element_ty), mask=is_kv)


def rope_and_write_kv(
    qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, qk_norm: Tensor | None, eps: float,
    pool: Tensor, layer: int, heads_per_program: int = 8, num_warps: int = 2,
) -> None:  # fmt: skip
    """Rotate q and k in place; store rotated k, and v, in the pool.

    qkv: (num_tokens, num_heads + 2 num_kv_heads, head_dim), contiguous; head_dim a power of two.
    table: (num_positions, 2, head_dim), cosines and signed sines. positions: int (num_tokens,).
    slots: int (num_tokens,): block id * block_size + offset in the block; negative: nothing is stored.
    qk_norm: (num_heads + num_kv_heads, head_dim) or None.
    pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), contiguous.
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    if head_dim & (head_dim - 1) or pool.shape[5] != head_dim:
        raise ValueError(f"head_dim {head_dim} must be a power of two and the pool's, {pool.shape[5]}")
    if not (qkv.is_contiguous() and table.is_contiguous() and pool.is_contiguous()):
        raise ValueError("qkv, table and pool must be contiguous")
    if num_tokens == 0:
        return
    heads = min(heads_per_program, triton.next_power_of_2(num_all_heads))
    _rope_kernel[(num_tokens, triton.cdiv(num_all_heads, heads))](
        qkv, table, positions, slots, qk_norm if qk_norm is not None else table, pool,
        layer, qkv.stride(0), pool.stride(0), pool.stride(1), eps,
        NUM_HEADS=num_all_heads - 2 * num_kv_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, HAS_NORM=qk_norm is not None, HEADS=heads, OVERLAPS=overlaps_launches(qkv),
        num_warps=num_warps, launch_pdl=overlaps_launches(qkv),
    )  # fmt: skip


def rope_reference(
    qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, qk_norm: Tensor | None, eps: float,
    pool: Tensor, layer: int,
) -> None:  # fmt: skip
    """The same with plain torch operations; every slot must be valid."""
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    num_qk_heads = qkv.shape[1] - num_kv_heads
    qk = qkv[:, :num_qk_heads]
    if qk_norm is not None:
        qk.copy_(rms_norm(qk, qk_norm, eps))
    rows = table[positions]
    rotate_(qk, rows[:, :1], rows[:, 1:])
    kv = qkv[:, num_qk_heads - num_kv_heads :].unflatten(1, (2, num_kv_heads))
    block_ids = torch.div(slots, block_size, rounding_mode="floor").long()
    write_kv(pool, layer, kv, block_ids, (slots % block_size).long())
