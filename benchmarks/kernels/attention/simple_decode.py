"""Decode attention over the paged KV pool without splits, as a baseline for `paged_decode`.

Reference: `attend_causally` of `kernels/paged_attention.py`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.decode_tiles import LOG2_E, tile_offsets


@triton.jit(do_not_specialize=["layer"])
def _simple_decode_kernel(
    q_ptr, pool_ptr, tables_ptr, lengths_ptr, out_ptr,
    layer, q_stride, table_stride, block_stride, layer_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + row * q_stride + head * HEAD_DIM + dims).to(tl.float32)
    keys_ptr = pool_ptr + layer.to(tl.int64) * layer_stride + (head // GROUP) * (BLOCK_SIZE * HEAD_DIM)
    values_ptr = keys_ptr + NUM_KV_HEADS * (BLOCK_SIZE * HEAD_DIM)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    mixed = tl.zeros((HEAD_DIM,), tl.float32)
    for first in range(0, length, BLOCK_SIZE):
        offsets = tile_offsets(
            tables_ptr + row * table_stride, first, length, block_stride, BLOCK_SIZE, BLOCK_SIZE, HEAD_DIM
        )
        visible = first + tl.arange(0, BLOCK_SIZE) < length
        keys = tl.load(keys_ptr + offsets[:, None] + dims[None, :]).to(tl.float32)
        scores = tl.where(visible, tl.sum(keys * q[None, :], axis=1) * scale, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=0))
        weights = tl.exp2(scores - new_highest)
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, axis=0)
        values = tl.load(values_ptr + offsets[:, None] + dims[None, :], mask=visible[:, None], other=0.0)
        mixed = mixed * shrink + tl.sum(values.to(tl.float32) * weights[:, None], axis=0)
        highest = new_highest
    mixed = mixed / tl.where(total > 0, total, 1.0)
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    tl.store(out_ptr + (row * num_heads + head) * HEAD_DIM + dims, mixed.to(out_ptr.dtype.element_ty))


def simple_decode(q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, lengths: Tensor) -> Tensor:
    """Attend with one program per query head, which walks the whole sequence."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    out = torch.empty(num_rows, num_heads * head_dim, dtype=q.dtype, device=q.device)
    _simple_decode_kernel[(num_heads, num_rows)](
        q, pool, block_tables, lengths, out,
        layer, q.stride(0), block_tables.stride(0), pool.stride(0), pool.stride(1), LOG2_E / math.sqrt(head_dim),
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        num_warps=4,
    )  # fmt: skip
    return out
