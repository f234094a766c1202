"""Digests of KV blocks, each taken as one row of 64-bit words over all layers.

    digest_i = sum_j (a_j * x_ij + b_j * (x_ij >> 32))  mod 2^64     of the words x_i of block ids[i]

The weights a, b, which are an argument, are those of `kvstore.pool.digest`.
"""

from __future__ import annotations

from torch import Tensor


def digest_blocks(blocks: Tensor, ids: Tensor, weights: Tensor, digests: Tensor | None = None) -> Tensor:
    """Compute digests: blocks int64 (num_blocks, num_words), weights int64 (2, num_words) -> int64 (num_ids,).

    With `digests`, the result is added to them.
    """
    words = blocks[ids.long()]
    result = (weights[0] * words + weights[1] * (words >> 32)).sum(dim=1)
    return result if digests is None else digests.add_(result)
