"""Attention for CPUs in plain torch: batched products over dense K and V, in pieces that stay in the cache.

Same formula as `kernels/paged_attention.py`. Two rules make it fast. The number of keys is padded to few distinct
values, because the library behind `bmm` compiles a program per shape (0.9 ms). Long chunks are cut into blocks of
queries, each against the keys it can see: on two cores, 512 queries over 1024 keys, 9 heads of 64 in bfloat16, take
2.9 ms; one `scaled_dot_product_attention` takes 8.1.

Padded keys and values must be finite; they get a score of minus infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

QUERY_BLOCK = 128
FUSED_KEYS = 384  # one sequence of up to so many keys: fused; 192: 24 us against 37, 1024: 105 against 70
MINUS_INFINITY = float("-inf")


def padded_len(num_keys: int) -> int:
    """The next of the lengths that are used: steps of 64, from 512 on 128, from 2048 on 256."""
    step = 64 if num_keys <= 512 else 128 if num_keys <= 2048 else 256
    return -(-num_keys // step) * step


def keys_to_read(num_rows: int, num_keys: int, capacity: int) -> int:
    """How many keys of each row of `capacity` `decode_attention` should be given, of which `num_keys` count.

    `bmm` copies keys and values that do not fill their rows: with 8 rows a third more keys are read in the time of a
    copy. The fused operation takes them as they lie and compiles nothing per length; steps of 16 spare most padding
    and let views of all layers live for 16 decode steps.
    """
    padded = min(-(-num_keys // 16) * 16, capacity)
    return padded if num_rows == 1 and padded <= FUSED_KEYS else capacity


def mask_source(max_keys: int, dtype: torch.dtype) -> Tensor:
    """(2 * max_keys,): what `key_mask` cuts masks from, first visible places, then hidden ones."""
    source = torch.zeros(2 * max_keys, dtype=dtype)
    source[max_keys:] = MINUS_INFINITY
    return source


def key_mask(source: Tensor, lengths: Sequence[int], num_keys: int) -> Tensor:
    """(rows, 1, 1, num_keys): 0 for keys of the sequence, minus infinity for padding. Neither exceeds `max_keys`."""
    max_keys = source.shape[0] // 2
    rows = [source[max_keys - length : max_keys - length + num_keys] for length in lengths]
    return rows[0].view(1, 1, 1, -1) if len(rows) == 1 else torch.stack(rows)[:, None, None]


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One query per sequence.

    q: (rows, kv_heads, group, head_dim); keys, values: (rows, kv_heads, num_keys, head_dim);
    mask: (rows, 1, 1, num_keys). Returns the shape of q.
    """
    if mask.shape[0] == 1 and mask.shape[3] <= FUSED_KEYS:
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    by_head = keys.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(q.new_empty(1), q.flatten(0, 1), by_head, beta=0, alpha=scale)
    scores.view(mask.shape[0], -1, mask.shape[3]).add_(mask[:, 0])
    return torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1)).view(q.shape)


def causal_corner(num_queries: int, num_padding: int, group: int, dtype: torch.dtype) -> Tensor:
    """(num_queries * group, num_queries + num_padding): the mask over the keys of the queries themselves."""
    query = torch.arange(num_queries).repeat_interleave(group)
    hidden = torch.arange(num_queries + num_padding)[None, :] > query[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, MINUS_INFINITY)


def chunk_attention(q: Tensor, kv: Tensor, seq_len: int) -> Tensor:
    """Causal attention of a sequence's last queries.

    q: (num_queries, num_heads, head_dim); kv: (2, kv_heads, padded_len(seq_len) or more, head_dim).
    Returns (num_queries, num_heads, head_dim).
    """
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
        corner = causal_corner(count, num_keys - num_visible, group, q.dtype)
        scores[:, :, num_visible - count :].add_(corner)
        mixed = torch.bmm(torch.softmax(scores, dim=-1), kv[1, :, :num_keys])
        target = out[first : first + count].view(count, kv_heads, group, head_dim)
        target.copy_(mixed.view(kv_heads, count, group, head_dim).transpose(0, 1))
    return out
