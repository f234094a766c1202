"""Split-K: several programs share a tile's K, and their partial sums are added in the order of the splits.

`reduce_splits`: by the last of them to finish, within the launch. `sum_partials`: by the next kernel, as it reads
them. In both cases the result does not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


class SplitKWorkspace:
    """Partial sums and counters for consecutive launches; the counters are zero between launches.

    num_floats: `packed_stream` needs the most, 2 tiles of 128 x 64 for each of 264 programs.
    """

    def __init__(self, device: torch.device, num_floats: int = 5 << 20, num_tiles: int = 1 << 14) -> None:
        self.partials = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.counters = torch.zeros(num_tiles, dtype=torch.int32, device=device)

    def check(self, num_tiles: int, tile_size: int, split_k: int) -> None:
        """Raise ValueError if num_tiles tiles, of tile_size sums for each of split_k splits, do not fit."""
        size = num_tiles * split_k * tile_size
        if split_k > 1 and (size > self.partials.numel() or num_tiles > self.counters.numel()):
            raise ValueError(f"the workspace is too small for {size} partial sums of {num_tiles} tiles")


@triton.jit
def reduce_splits(total, partials_ptr, counters_ptr, tile, split, exists, SPLIT_K: tl.constexpr):
    """Reduce this split's `total` (columns, rows), where `exists`. Returns whether this is the last, and the sum."""
    ROWS: tl.constexpr = total.shape[1]
    COLUMNS: tl.constexpr = total.shape[0]
    is_last = True
    if SPLIT_K > 1:
        offsets = tl.arange(0, COLUMNS)[:, None] + tl.arange(0, ROWS)[None, :] * COLUMNS
        base = partials_ptr + tile * (SPLIT_K * COLUMNS * ROWS)
        tl.store(base + split * (COLUMNS * ROWS) + offsets, total, mask=exists)
        tl.debug_barrier()  # all stores of the program precede its one release below
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            tl.store(counters_ptr + tile, 0)
            total = tl.zeros((COLUMNS, ROWS), total.dtype)
            for i in tl.static_range(SPLIT_K):
                total += tl.load(base + i * (COLUMNS * ROWS) + offsets, mask=exists, other=0, cache_modifier=".cg")
    return is_last, total


@triton.jit
def sum_partials(ptr, offsets, mask, split_stride, NUM_SPLITS: tl.constexpr):
    """Sum up the elements at `offsets` of all splits' partial sums, in float32."""
    total = tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(ptr + split * split_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    return total
