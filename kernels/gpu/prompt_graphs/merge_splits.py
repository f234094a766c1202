"""KV splits of prompts' tiles: without them a few queries after a long context use few SMs.

The keys of a tile are split between programs, each of which leaves its partial output and the logarithm of its sum of
weights (`paged_prefill.py`); a second kernel merges those of a tile. The host decides how many splits there are, but
no launch depends on it: a graph has room for the most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge_kernel(
    merges_ptr, outputs_ptr, log_sums_ptr, out_ptr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_M: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """Compute the weighted mean of a tile's splits in order, for DIMS of its dimensions."""
    merge_ptr = merges_ptr + tl.program_id(0) * 4
    num_splits = tl.load(merge_ptr + 1)
    if num_splits == 0:
        return
    kv_head = tl.program_id(1)
    first_split = tl.load(merge_ptr) - 1
    first_token = tl.load(merge_ptr + 2)
    count = tl.load(merge_ptr + 3)
    members = tl.arange(0, TILE_M)
    dims = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    highest = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    mixed = tl.zeros((TILE_M, DIMS), tl.float32)
    for split in range(first_split, first_split + num_splits):
        mine = (split * NUM_KV_HEADS + kv_head) * TILE_M + members
        log_sums = tl.load(log_sums_ptr + mine)
        part = tl.load(outputs_ptr + mine[:, None] * HEAD_DIM + dims[None, :])
        new_highest = tl.maximum(highest, log_sums)
        pivot = tl.where(new_highest > float("-inf"), new_highest, 0.0)  # a window may end before a split's first key
        shrink = tl.exp2(highest - pivot)
        weights = tl.exp2(log_sums - pivot)
        mixed = mixed * shrink[:, None] + part * weights[:, None]
        total = total * shrink + weights
        highest = new_highest
    exists = (members < count * GROUP)[:, None]
    tokens = (first_token + members // GROUP).to(tl.int64)
    heads = kv_head * GROUP + members % GROUP
    target = out_ptr + (tokens[:, None] * (NUM_KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(target, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=exists)


def split_workspace(
    num_spare: int, num_kv_heads: int, tile_m: int, head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return memory for the outputs and log_sums of one launch; consecutive launches share it."""
    num_rows = 2 * num_spare * num_kv_heads * tile_m
    outputs = torch.empty(num_rows, head_dim, dtype=torch.float32, device=device)
    return outputs, torch.empty(num_rows, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class PrefillSplits:
    """See `TileSplits`.

    merges: int32 (at most num_spare, 4), from `split_tiles`; zeros are padding. outputs: (2 * num_spare *
    num_kv_heads * tile_m, head_dim). log_sums: one for each row.
    """

    merges: Tensor
    outputs: Tensor
    log_sums: Tensor

    def merge(self, out: Tensor, num_kv_heads: int, group: int, tile_m: int) -> None:
        """See TileSplits."""
        head_dim = self.outputs.shape[1]
        dims = min(head_dim, 64)
        _merge_kernel[(self.merges.shape[0], num_kv_heads, head_dim // dims)](
            self.merges, self.outputs, self.log_sums, out,
            NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, TILE_M=tile_m, DIMS=dims, num_warps=4,
        )  # fmt: skip
