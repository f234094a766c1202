"""Sums of products whose K several programs share: the last program of a tile to finish adds the parts.

In the order of the splits, so that the result does not depend on timing. Partial sums and counters, zero between
launches, are a `small_m_gemm.SmallMWorkspace`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_splits(total, partials_ptr, counters_ptr, tile, split, exists, SPLIT_K: tl.constexpr):
    """total: this split's (columns, rows), where `exists`. Returns whether this program is the last, and its sum."""
    ROWS: tl.constexpr = total.shape[1]
    COLUMNS: tl.constexpr = total.shape[0]
    is_last = True
    if SPLIT_K > 1:
        places = tl.arange(0, COLUMNS)[:, None] + tl.arange(0, ROWS)[None, :] * COLUMNS
        base = partials_ptr + tile * (SPLIT_K * COLUMNS * ROWS)
        tl.store(base + split * (COLUMNS * ROWS) + places, total, mask=exists)
        tl.debug_barrier()  # all of the program's stores come before its one release below
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            tl.store(counters_ptr + tile, 0)
            total = tl.zeros((COLUMNS, ROWS), total.dtype)
            for part in tl.static_range(SPLIT_K):
                total += tl.load(base + part * (COLUMNS * ROWS) + places, mask=exists, other=0, cache_modifier=".cg")
    return is_last, total
