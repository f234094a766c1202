"""Splits of a row's keys between decode programs: how many, what each takes and leaves, and what combines that.

Each split leaves its partial output and the logarithm of its sum of weights. One program per query head adds them up
or, when heads are few, one per 32 of its dimensions. (Letting the last split to finish combine was tried: 6 us slower
at 7 heads a group, because one program then does what 7 can.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.decode_tiles import LOG2_E_IN_KERNEL
from kernels.gpu.launching.fast_launch import FastLaunch
from kernels.gpu.launching.launch import num_multiprocessors, overlaps_launches, wait_for_predecessor
from kernels.gpu.launching.launch_configs import DecodeConfig
from kernels.gpu.launching.tuning import DECODE

MAX_SPLITS = 128
MIN_SHARE = tl.constexpr(32)  # keys a program takes at least: more splits cost more to combine than they save
USUAL_QUERIES = 4  # of a row that has several: how many rows a number of queries is taken for
COMBINE_PROGRAMS = 512  # fewer heads than this are combined in pieces of 32 dimensions


class DecodeWorkspace:
    """Partial results of one launch of at most `max_rows` rows, or queries of rows.

    One workspace serves launches that run one after the other: all layers of all steps of one stream.
    """

    def __init__(
        self, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, queries: int = 1
    ) -> None:
        """queries: see `splits_of`; launches with fewer of them fit, too."""
        group = num_heads // num_kv_heads
        num_partials = max(
            rows
            * num_heads
            * num_splits(groups, num_kv_heads, device, decode_config(groups, num_kv_heads, group, itemsize, head_dim))
            for rows in range(1, max_rows + 1)
            for groups in {rows, usual_groups(rows, queries)}
            for itemsize in (1, 2, 4)
        )
        self.outputs = torch.empty(num_partials, head_dim, dtype=torch.float32, device=device)
        self.log_sums = torch.empty(num_partials, dtype=torch.float32, device=device)


def tuned_rows(num_rows: int) -> int:
    """Return the rows of the captured step that holds so many: its settings are theirs, too, and compiled."""
    if num_rows <= 16:
        return 1 << (num_rows - 1).bit_length()
    step = 8 if num_rows <= 64 else 16 if num_rows <= 128 else 32
    return -(-num_rows // step) * step


def usual_groups(num_queries: int, most_queries: int) -> int:
    """Groups that have programs of their own, as far as is known when a graph is captured."""
    return -(-num_queries // min(most_queries, USUAL_QUERIES))


def decode_config(num_rows: int, num_kv_heads: int, group: int, itemsize: int, head_dim: int = 128) -> DecodeConfig:
    """Settings for K and V of `itemsize` bytes a number; group: query heads of a KV head."""
    programs = tuned_rows(num_rows) * num_kv_heads
    config = DECODE.find(programs=programs, group=group, itemsize=itemsize, head_dim=head_dim)
    assert config is not None, "the last rule has no bounds"
    return config


def num_splits(num_rows: int, num_kv_heads: int, device: torch.device, config: DecodeConfig) -> int:
    """Programs that share a row's keys of one KV head; 1 when rows and heads alone fill the GPU."""
    programs = config.programs_per_sm * num_multiprocessors(device)
    return max(1, min(MAX_SPLITS, programs // (tuned_rows(num_rows) * num_kv_heads)))


def splits_of(
    num_rows: int, num_heads: int, pool: Tensor, workspace: DecodeWorkspace, config: DecodeConfig | None,
    splits: int | None, window: int, queries: int = 1,
) -> tuple[DecodeConfig, int]:  # fmt: skip
    """Settings and splits of a launch: those asked for, or chosen. Raise ValueError beyond the workspace.

    queries: the most that a program attends for; rows are queries then.
    """
    num_kv_heads, groups = pool.shape[3], usual_groups(num_rows, queries)
    config = config or decode_config(groups, num_kv_heads, num_heads // num_kv_heads, pool.itemsize, pool.shape[5])
    count = splits or num_splits(groups, num_kv_heads, pool.device, config)
    if window and splits is None:
        count = min(count, window // MIN_SHARE.value + 2)  # a window's keys give no more programs a share
    if count > 1 and num_rows * num_heads * count > workspace.outputs.shape[0]:
        raise ValueError(f"the workspace is too small for {num_rows} rows in {count} splits")
    return config, count


@triton.jit
def share_of_keys(length, first_key, split, num_splits, TILE: tl.constexpr):
    """A split's first tile and end tile, and how many splits have any: one, without tiles, of a sequence of length 0.

    first_key: with a window the first that is seen, else None.
    """
    base = 0
    if first_key is not None:
        base = first_key // TILE
    num_tiles = tl.cdiv(length, TILE) - base
    share = tl.maximum(tl.cdiv(num_tiles, num_splits), tl.cdiv(MIN_SHARE, TILE))
    num_used = tl.maximum(tl.cdiv(num_tiles, share), 1)
    first_tile = base + split * share
    end_tile = tl.minimum(first_tile + share, base + num_tiles)
    return first_tile, end_tile, num_used


@triton.jit
def store_attended(
    mixed, mixed_odd, total, highest, out_ptr, outputs_ptr, log_sums_ptr, sinks_ptr, row, kv_head, split, num_splits,
    num_used,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, IS_8_BIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write a program's heads to the output, or where other splits have keys of the row, to the partial results."""
    PADDED: tl.constexpr = mixed.shape[0]
    members = tl.arange(0, PADDED)
    dims = tl.arange(0, HEAD_DIM)
    is_member = (members < GROUP)[:, None]
    if HAS_SINKS:  # the first split's
        heads = kv_head * GROUP + members
        sink = tl.load(sinks_ptr + heads, mask=members < GROUP, other=0.0).to(tl.float32) * LOG2_E_IN_KERNEL
        sink = tl.where(split == 0, sink, float("-inf"))
        new_highest = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.exp2(sink - new_highest)
        mixed = mixed * shrink[:, None]
        mixed_odd = mixed_odd * shrink[:, None]
        highest = new_highest
    if IS_8_BIT:
        mixed = tl.reshape(tl.join(mixed, mixed_odd), (PADDED, HEAD_DIM))
    # A row of length 0 (padding of a bucket) gets zeros.
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    out_row = out_ptr + (row * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
    if num_used == 1:
        tl.store(
            out_row + members[:, None] * HEAD_DIM + dims[None, :], mixed.to(out_ptr.dtype.element_ty), mask=is_member
        )
    else:
        mine = ((row * NUM_KV_HEADS + kv_head) * GROUP + members) * num_splits + split
        tl.store(outputs_ptr + mine[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_member)
        tl.store(log_sums_ptr + mine, highest + tl.log2(total), mask=members < GROUP)


@FastLaunch
@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    lengths_ptr, out_ptr, outputs_ptr, log_sums_ptr, num_splits,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, PADDED_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Weighted mean of one head's splits, in their order; DIMS of its dimensions."""
    head = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    length = tl.load(lengths_ptr + tl.program_id(1)).to(tl.int32)
    num_tiles = tl.cdiv(length, TILE)
    if WINDOW > 0:
        num_tiles -= tl.maximum(length - WINDOW, 0) // TILE
    num_used = tl.cdiv(num_tiles, tl.maximum(tl.cdiv(num_tiles, num_splits), tl.cdiv(MIN_SHARE, TILE)))
    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    used = splits < num_used
    partial_ids = head * num_splits + splits
    wait_for_predecessor(OVERLAPS)
    if num_used <= 1:
        return
    log_sums = tl.load(log_sums_ptr + partial_ids, mask=used, other=float("-inf"))
    partials = tl.load(outputs_ptr + partial_ids[:, None] * HEAD_DIM + dims[None, :], mask=used[:, None], other=0.0)
    weights = tl.exp2(log_sums - tl.max(log_sums, axis=0))
    mixed = tl.sum(partials * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out_ptr + head * HEAD_DIM + dims, mixed.to(out_ptr.dtype.element_ty))


def combine_splits(
    lengths: Tensor, out: Tensor, workspace: DecodeWorkspace, num_splits: int, tile: int, window: int = 0
) -> None:
    """Write rows of more than one share to `out` (num_rows, num_heads * head_dim). tile, window: as of the splits."""
    head_dim = workspace.outputs.shape[1]
    num_rows, num_heads = out.shape[0], out.shape[1] // head_dim
    dims = head_dim if tuned_rows(num_rows) * num_heads >= COMBINE_PROGRAMS else min(head_dim, 32)
    overlaps = overlaps_launches(out)
    _combine_kernel[(num_heads, num_rows, head_dim // dims)](
        lengths, out, workspace.outputs, workspace.log_sums, num_splits,
        HEAD_DIM=head_dim, DIMS=dims, TILE=tile, PADDED_SPLITS=triton.next_power_of_2(num_splits),
        WINDOW=window, OVERLAPS=overlaps, num_warps=2 if dims <= 32 else 4, launch_pdl=overlaps,
    )  # fmt: skip
