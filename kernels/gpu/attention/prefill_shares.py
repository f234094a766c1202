"""Tiles of prompts whose keys several programs share: without that a few queries after a long context use few SMs.

A tile is split into shares of its keys, each with a program of its own, which leaves its partial output and the
logarithm of its sum of weights (`paged_prefill.py`); a second kernel adds those of a tile up. The host decides how
many shares there are, and no launch depends on it: a graph has room for the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching.launch import num_multiprocessors

Tile = tuple[int, int, int, int]
WIDTH = 7  # numbers of a tile that may be split
MIN_SHARE = 1024  # keys: combining costs more than smaller shares save
UNIT = 128  # keys, a multiple of what a program's loop takes at a time
PER_MULTIPROCESSOR = 2  # programs that run at once


def num_spare_tiles(num_kv_heads: int, device: torch.device) -> int:
    """Tiles that fill the GPU, and how many more than whole ones `split_tiles` gives at most."""
    return max(PER_MULTIPROCESSOR * num_multiprocessors(device) // num_kv_heads, 1)


def split_tiles(tiles: Sequence[Tile], num_spare: int) -> tuple[list[tuple[int, ...]], list[Tile]]:
    """Split tiles of `prefill_tiles` until they fill the GPU.

    Returns tiles with their share, longest first: the tile's four numbers, first key, end key, and slot; slot 0: the
    tile is whole. And what has to be merged: (slot of the first share, shares, index of the tile's first token,
    tokens), at most `num_spare`. Slots are numbered from 1 to at most twice `num_spare`.
    """
    keys = [position + count for _, _, position, count in tiles]
    if max(keys, default=0) <= MIN_SHARE:
        return [(*tile, 0, num_keys, 0) for tile, num_keys in zip(tiles, keys, strict=True)], []
    most = max(-(-sum(keys) // num_spare), MIN_SHARE)
    while len(tiles) < num_spare < sum(-(-num_keys // most) for num_keys in keys):
        most += most // 4  # a second wave of programs would be mostly empty
    found: list[tuple[int, ...]] = []
    merges: list[Tile] = []
    slot = 1
    for tile, num_keys in zip(tiles, keys, strict=True):
        size = -(-num_keys // -(-num_keys // most))
        size = -(-size // UNIT) * UNIT
        starts = range(0, tile[2] + 1, size)  # all queries of the tile see a share's first key
        if len(starts) == 1:
            found.append((*tile, 0, num_keys, 0))
            continue
        merges.append((slot, len(starts), tile[1], tile[3]))
        ends = [*starts[1:], num_keys]
        found += [(*tile, *share, slot + i) for i, share in enumerate(zip(starts, ends, strict=True))]
        slot += len(starts)
    return sorted(found, key=lambda share: share[4] - share[5]), merges


@dataclass(frozen=True, slots=True)
class ShareMemory:
    """Partial results of one launch's shares; launches that run one after the other use the same.

    outputs: float32 (2 * num_spare * num_kv_heads * tile_m, head_dim). log_sums: float32, one for each row.
    """

    outputs: Tensor
    log_sums: Tensor

    @classmethod
    def of(cls, num_spare: int, num_kv_heads: int, tile_m: int, head_dim: int, device: torch.device) -> ShareMemory:
        num_rows = 2 * num_spare * num_kv_heads * tile_m
        outputs = torch.empty(num_rows, head_dim, dtype=torch.float32, device=device)
        return cls(outputs, torch.empty(num_rows, dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True)
class Shares:
    """merges: int32 (at most num_spare, 4), of `split_tiles`; zeros are padding."""

    merges: Tensor
    memory: ShareMemory


@triton.jit
def _merge_kernel(
    merges_ptr, outputs_ptr, log_sums_ptr, out_ptr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_M: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """Weighted mean of a tile's shares, in their order; DIMS of its dimensions."""
    merge_ptr = merges_ptr + tl.program_id(0) * 4
    num_shares = tl.load(merge_ptr + 1)
    if num_shares == 0:
        return
    kv_head = tl.program_id(1)
    first_share = tl.load(merge_ptr) - 1
    first_token = tl.load(merge_ptr + 2)
    count = tl.load(merge_ptr + 3)
    members = tl.arange(0, TILE_M)
    dims = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    highest = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    mixed = tl.zeros((TILE_M, DIMS), tl.float32)
    for share in range(first_share, first_share + num_shares):
        mine = (share * NUM_KV_HEADS + kv_head) * TILE_M + members
        log_sums = tl.load(log_sums_ptr + mine)
        part = tl.load(outputs_ptr + mine[:, None] * HEAD_DIM + dims[None, :])
        new_highest = tl.maximum(highest, log_sums)
        pivot = tl.where(new_highest > float("-inf"), new_highest, 0.0)  # a window may end before a share's first key
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


def merge_shares(shares: Shares, out: Tensor, num_kv_heads: int, group: int, tile_m: int) -> None:
    """Write the tiles that are split to `out` (num_tokens, num_heads * head_dim)."""
    memory = shares.memory
    head_dim = memory.outputs.shape[1]
    dims = min(head_dim, 64)
    _merge_kernel[(shares.merges.shape[0], num_kv_heads, head_dim // dims)](
        shares.merges, memory.outputs, memory.log_sums, out,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, TILE_M=tile_m, DIMS=dims, num_warps=4,
    )  # fmt: skip
