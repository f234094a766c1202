"""Attention over a paged KV pool, in plain torch: the reference of every faster implementation.

For query i of a sequence at position p_i: softmax(q_i K[0..p_i]^T / sqrt(head_dim)) V[0..p_i].

A pool has planes of K and V; with latent attention (MLA) it has one plane, whose first columns are V and which all
query heads share. It stores them in the computed dtype, or rounded to float8_e4m3fn and clamped to +-448.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

FP8_MAX = 448.0  # the largest float8_e4m3fn


def as_stored(kv: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert K and V to the dtype of a pool. NaN stays NaN."""
    return kv.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == torch.float8_e4m3fn else kv


def write_kv(pool: Tensor, layer: int, kv: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """Store kv (num_tokens, planes, num_kv_heads, head_dim) at [block_ids[t], layer, :, :, offsets[t]] of the pool.

    pool: (num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim).
    """
    target = indexable(pool)[:, layer].permute(0, 3, 1, 2, 4)
    target.index_put_((block_ids, offsets), indexable(as_stored(kv, pool.dtype)))


def gather_kv(pool: Tensor, layer: int, block_ids: Tensor, seq_len: int) -> Tensor:
    """Copy one sequence out of its blocks: (planes, num_kv_heads, seq_len, head_dim) in the pool's dtype."""
    blocks = indexable(pool)[block_ids, layer].view(pool.dtype)  # (n, planes, heads, block_size, head_dim)
    return blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]


def attend_causally(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute causal attention of a sequence's last queries.

    q: (num_queries, num_heads, head_dim), the last `num_queries` positions of the sequence.
    keys: (num_kv_heads, seq_len, head_dim); values: (num_kv_heads, seq_len, value_dim), which may be a view of keys.
    Returns (num_queries, num_heads, value_dim).
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, seq_len = keys.shape[:2]
    group = num_heads // num_kv_heads
    positions = torch.arange(seq_len - num_queries, seq_len, device=q.device).repeat(group)
    visible = torch.arange(seq_len, device=q.device)[None, :] <= positions[:, None]
    # All queries that share a KV head are rows of one GEMM; repeating K and V for each query head would copy them.
    grouped = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    keys, values = keys.to(q.dtype), values.to(q.dtype)
    # On a GPU torch chooses a memory-efficient kernel, which (2.11, float32, 65 tokens, a mask) gives the last query
    # the first one's result.
    with sdpa_kernel(SDPBackend.MATH) if q.is_cuda else nullcontext():
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible)
    return out.view(num_kv_heads, group, num_queries, -1).permute(2, 0, 1, 3).flatten(1, 2)


def indexable(x: Tensor) -> Tensor:
    """View the memory as a type that torch can index on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
