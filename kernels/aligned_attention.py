"""Attention of chunks of prompts on CPUs whose bits do not depend on how a prompt is cut, in plain torch.

That of `kernels/paged_attention.py`, but for query i at position p_i keys from a on: 0, or with a window w the larger
of 0 and p_i - w + 1. A sink s of a head takes part in its softmax as one score more, without a value: exp(s) is added
to the denominator. A softcap c makes c tanh(x / c) of every score x.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu_features import has_bfloat16_gemms

ALIGNED_QUERIES = 64  # of a block
MINUS_INFINITY = float("-inf")


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
