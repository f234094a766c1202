"""Attention for prompt chunks on CPUs, by batched GEMMs in plain torch, over gathered keys.

Same formula as `kernels/paged_attention.py`. Two rules make batched GEMMs fast. The number of keys is padded to few
distinct values, since the library under `bmm` compiles a program per shape (0.9 ms). Long chunks are split into
blocks of queries, each over the keys that it sees: on two cores, 512 queries over 1024 keys, 9 heads of 64 in
bfloat16, take 2.9 ms; one `scaled_dot_product_attention` takes 8.1.

Padded keys and values must be finite; they get a score of minus infinity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.aligned_attention import MINUS_INFINITY, aligned_attention
from kernels.cpu_features import has_bfloat16_gemms

QUERY_BLOCK = 128
MAX_PADDING = 255  # by `padded_len`


def padded_len(num_keys: int) -> int:
    """Pad to the next length that chunks use: steps of 64, from 512 on 128, from 2048 on 256."""
    step = 64 if num_keys <= 512 else 128 if num_keys <= 2048 else 256
    return -(-num_keys // step) * step


def causal_corner(group: int, dtype: torch.dtype) -> Tensor:
    """Return the mask (QUERY_BLOCK * group, QUERY_BLOCK + MAX_PADDING) of a block of queries over its own keys.

    For fewer queries and less padding, its upper left part.
    """
    query = torch.arange(QUERY_BLOCK).repeat_interleave(group)
    hidden = torch.arange(QUERY_BLOCK + MAX_PADDING)[None, :] > query[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, MINUS_INFINITY)


def chunk_attention(q: Tensor, kv: Tensor, seq_len: int, corner: Tensor) -> Tensor:
    """Compute causal attention of a sequence's last queries.

    q: (num_queries, num_heads, head_dim); kv: (2, kv_heads, padded_len(seq_len) or more, head_dim); corner:
    `causal_corner` of the heads that share a KV head. Returns (num_queries, num_heads, head_dim).
    """
    if q.dtype == torch.bfloat16 and not has_bfloat16_gemms():
        return aligned_attention(q, kv[0, :, :seq_len], kv[1, :, :seq_len])
    num_queries, num_heads, head_dim = q.shape
    kv_heads = kv.shape[1]
    group = num_heads // kv_heads
    scale = 1.0 / math.sqrt(head_dim)
    out = torch.empty(num_queries, num_heads, head_dim, dtype=q.dtype)
    for first in range(0, num_queries, QUERY_BLOCK):
        count = min(QUERY_BLOCK, num_queries - first)
        num_visible = seq_len - num_queries + first + count
        num_keys = padded_len(num_visible)
        block = q[first : first + count].view(count, kv_heads, group, head_dim).transpose(0, 1)
        block = block.reshape(kv_heads, count * group, head_dim)
        scores = torch.baddbmm(q.new_empty(1), block, kv[0, :, :num_keys].transpose(1, 2), beta=0, alpha=scale)
        scores[:, :, num_visible - count :].add_(corner[: count * group, : num_keys - num_visible + count])
        mixed = torch.bmm(torch.softmax(scores, dim=-1), kv[1, :, :num_keys])
        target = out[first : first + count].view(count, kv_heads, group, head_dim)
        target.copy_(mixed.view(kv_heads, count, group, head_dim).transpose(0, 1))
    return out
