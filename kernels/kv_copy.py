"""Copies KV blocks between pools and computes their digests; all layers of a block are one row of 64-bit words.

    target[target_ids[i]] = source[source_ids[i]]
    digest_i = sum_j (a_j * x_ij + b_j * (x_ij >> 32))  mod 2^64     of the words x_i of block source_ids[i]

The weights a, b are those of `kvstore.pool.digest`; they come as an argument.
"""

from __future__ import annotations

from torch import Tensor


def copy_blocks(
    source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor, weights: Tensor | None = None
) -> Tensor | None:
    """source, target: int64 (num_blocks, num_words); weights: int64 (2, num_words) -> digests int64 (num_ids,)."""
    target[target_ids.long()] = source[source_ids.long()]
    return None if weights is None else digest_blocks(source, source_ids, weights)


def digest_blocks(blocks: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """blocks: int64 (num_blocks, num_words); weights: int64 (2, num_words) -> int64 (num_ids,)."""
    words = blocks[ids.long()]
    return (weights[0] * words + weights[1] * (words >> 32)).sum(dim=1)
