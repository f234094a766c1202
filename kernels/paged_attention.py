"""Attention over a paged KV pool, in plain torch: what every faster implementation must equal, and, for chunks of
prompts on CPUs, a form whose bits do not depend on how a prompt is cut (`aligned_attention`).

For query i of a sequence at position p_i: softmax(q_i K[a..p_i]^T / sqrt(head_dim)) V[a..p_i], where a is 0, or with
a window w the larger of 0 and p_i - w + 1. A sink s of a head takes part in its softmax as one score more, without a
value: exp(s) is added to the denominator. A softcap c makes c tanh(x / c) of every score x.

A pool has planes of K and V; or of latent attention (MLA) one plane, whose first columns are V and which all query
heads share. It holds them as they are computed, or as float8_e4m3fn: rounded when written, beyond +-448 cut off.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.cpu_features import has_bfloat16_gemms

ALIGNED_QUERIES = 64  # of a block
MINUS_INFINITY = float("-inf")
FP8_MAX = 448.0  # the largest float8_e4m3fn


def as_stored(kv: Tensor, dtype: torch.dtype) -> Tensor:
    """K and V as a pool of `dtype` stores them. NaN stays NaN."""
    return kv.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == torch.float8_e4m3fn else kv


def write_kv(pool: Tensor, layer: int, kv: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """Store kv (num_tokens, planes, num_kv_heads, head_dim) at [block_ids[t], layer, :, :, offsets[t]] of the pool.

    pool: (num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim).
    """
    target = indexable(pool)[:, layer].permute(0, 3, 1, 2, 4)
    target.index_put_((block_ids, offsets), indexable(as_stored(kv, pool.dtype)))


def gather_kv(pool: Tensor, layer: int, block_ids: Tensor, seq_len: int) -> Tensor:
    """One sequence, copied out of its blocks: (planes, num_kv_heads, seq_len, head_dim) in the pool's dtype."""
    blocks = indexable(pool)[block_ids, layer].view(pool.dtype)  # (n, planes, heads, block_size, head_dim)
    return blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]


def attend_causally(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of a sequence's last queries, without a window or sinks.

    q: (num_queries, num_heads, head_dim), the last `num_queries` positions of the sequence.
    keys: (num_kv_heads, seq_len, head_dim); values: (num_kv_heads, seq_len, value_dim), which may be a view of keys.
    Returns (num_queries, num_heads, value_dim).
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, seq_len = keys.shape[:2]
    group = num_heads // num_kv_heads
    positions = torch.arange(seq_len - num_queries, seq_len, device=q.device).repeat(group)
    visible = torch.arange(seq_len, device=q.device)[None, :] <= positions[:, None]
    # All queries that share a KV head are rows of one product: K and V repeated for each would be copied for each.
    grouped = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    keys, values = keys.to(q.dtype), values.to(q.dtype)
    # On a GPU torch chooses a memory-efficient kernel, which (2.11, float32, 65 tokens, a mask) gives the last query
    # the first one's result.
    with sdpa_kernel(SDPBackend.MATH) if q.is_cuda else nullcontext():
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible)
    return out.view(num_kv_heads, group, num_queries, -1).permute(2, 0, 1, 3).flatten(1, 2)


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Scores below `softcap` in size; 0: as they are."""
    return (scores / softcap).tanh() * softcap if softcap else scores


def aligned_attention(
    q: Tensor, keys: Tensor, values: Tensor, first_key: int = 0, window: int = 0, sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Causal attention of a sequence's last queries, with windows and sinks, in blocks of ALIGNED_QUERIES positions.

    bfloat16 is computed in float32 where the CPU has no GEMMs for it: 512 queries over 1,024 keys, 9 heads of 64,
    take 40 ms on one core so, 400 in bfloat16.

    Every block is computed whole, over keys up to its end, whichever of its queries are asked for. So the shapes of
    the GEMMs follow from positions alone, and a query's bits do not depend on how its prompt was cut into chunks.

    q: (num_queries, num_heads, head_dim). keys: (kv_heads, num_keys, head_dim), of positions from `first_key` to the
    last query's; values: (kv_heads, num_keys, value_dim). window: keys that a query sees, itself included; 0: all.
    sinks: (num_heads,) or None, softcap: see above.
    Returns (num_queries, num_heads, value_dim).
    """
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and not has_bfloat16_gemms():
        wide = aligned_attention(q.float(), keys.float(), values.float(), first_key, window, sinks, softcap)
        return wide.to(q.dtype)
    num_queries, num_heads, head_dim = q.shape
    kv_heads = keys.shape[0]
    group = num_heads // kv_heads
    stop = first_key + keys.shape[1]
    start = stop - num_queries
    after = -stop % ALIGNED_QUERIES
    keys, values = functional.pad(keys, (0, 0, 0, after)), functional.pad(values, (0, 0, 0, after))
    out = torch.empty(num_queries, num_heads, values.shape[2], dtype=q.dtype, device=q.device)
    for block in range(start - start % ALIGNED_QUERIES, stop, ALIGNED_QUERIES):
        end = block + ALIGNED_QUERIES
        oldest = max(0, block - window + 1) if window else 0
        oldest -= oldest % ALIGNED_QUERIES
        before = max(first_key - oldest, 0)  # keys that only the block's earlier queries see, and may be gone
        seen = slice(max(oldest - first_key, 0), end - first_key)
        block_keys = functional.pad(keys[:, seen], (0, 0, before, 0))
        block_values = functional.pad(values[:, seen], (0, 0, before, 0))
        first, last = max(start, block), min(stop, end)
        queries = q.new_zeros(ALIGNED_QUERIES, num_heads, head_dim)
        queries[first - block : last - block] = q[first - start : last - start]
        rows = queries.view(-1, kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
        scores = capped(torch.matmul(rows, block_keys.transpose(1, 2)).float() * head_dim**-0.5, softcap)
        scores.masked_fill_(_hidden(block, oldest, end, window, group, q.device), MINUS_INFINITY)
        if sinks is not None:
            by_row = sinks.float().view(kv_heads, 1, group).expand(-1, ALIGNED_QUERIES, -1).reshape(kv_heads, -1, 1)
            scores = torch.cat([scores, by_row], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : block_keys.shape[1]].to(block_values.dtype)
        mixed = torch.matmul(weights, block_values).view(kv_heads, ALIGNED_QUERIES, group, -1).transpose(0, 1)
        out[first - start : last - start] = mixed.flatten(1, 2)[first - block : last - block]
    return out


def _hidden(block: int, oldest: int, end: int, window: int, group: int, device: torch.device) -> Tensor:
    """Bool (ALIGNED_QUERIES * group, end - oldest): keys that a block's queries do not see."""
    positions = torch.arange(block, end, device=device).repeat_interleave(group)[:, None]
    tokens = torch.arange(oldest, end, device=device)[None]
    hidden = tokens > positions
    return hidden | (tokens <= positions - window) if window else hidden


def indexable(x: Tensor) -> Tensor:
    """View the memory as a type that torch can index on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
