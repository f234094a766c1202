"""Low-rank adapters of a layer, on a GPU: y[i] += B[s_i] (A[s_i] x[i]), where s_i is the slot of row i's adapter.

    shrink   h[i, m] = A[s_i, m] x[i]                 A: (num_slots, num_modules, max_rank, in)
    expand   y[i, n] += B[s_i, n] h[i, module of n]   B: (num_slots, max_rank, out), scaled

A layer may consist of several modules of the checkpoint (q, k and v): each has its own rows of y, and its own A.
`ranks` says how many rows of A an adapter has for a module; nothing beyond is read for smaller ranks, or for layers
without an adapter. One launch each for the rows of all adapters, by tiles of rows of one adapter (`row_tiles.py`):
programs of empty tiles return at once, and rows without an adapter are not touched. Sums and h are in float32. Shrink
has few rows of A and many columns: programs divide the columns, and expand adds up their split-K partials of h in a
fixed order. Both prefetch their weights before they wait for the previous kernel.

Reference: `low_rank_reference`.
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import FastLaunch, overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.lora.few_rows import LINE, dot_of_tile, expand_few_kernel, shrink_few_kernel
from kernels.gpu.lora.row_tiles import BLOCK_ROWS, NOTHING, RowTiles

MAX_MODULES = 3  # per layer
MIN_STRIP = 16  # outputs
COLUMNS_OF_WARP = 128  # if rows are few: more columns of B do not fit into registers
MAX_FEW_ROWS = 64  # rows of a step whose adapters have a few rows each
FEW_BLOCK_K, FEW_STAGES = 128, 4  # of fuller tiles of such a step
BLOCK_RANKS = 16  # at a time; ranks that an adapter lacks are not read


class LowRankConfig(NamedTuple):
    """block_k: columns of x at a time. split: columns per program of shrink. block_n: outputs at a time. strip: most
    outputs per program of expand. few_split, few_warps: of shrink in steps of few rows.
    """

    block_k: int = 128
    split: int = 512
    num_warps: int = 2
    num_stages: int = 4
    block_n: int = 128
    strip: int = 256
    expand_warps: int = 4
    expand_stages: int = 3
    few_split: int = 512
    few_warps: int = 4


class SlotWeights(NamedTuple):
    """Adapters of all slots for one layer. a, b: see above. ranks: int32 (num_slots, num_modules).

    starts: the first output of each module, then the number of outputs.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    starts: tuple[int, ...]

    @classmethod
    def empty(
        cls, num_slots: int, max_rank: int, num_columns: int, starts: tuple[int, ...], dtype: torch.dtype,
        device: torch.device,
    ) -> SlotWeights:  # fmt: skip
        """Return weights without any adapter."""
        modules = len(starts) - 1
        return cls(
            torch.zeros(num_slots, modules, max_rank, num_columns, dtype=dtype, device=device),
            torch.zeros(num_slots, max_rank, starts[-1], dtype=dtype, device=device),
            torch.zeros(num_slots, modules, dtype=torch.int32, device=device),
            starts,
        )


def config_of(weights: SlotWeights) -> LowRankConfig:
    """Choose a layer's configuration. More columns get larger splits, since each program of expand sums partials."""
    return LowRankConfig() if weights.a.shape[-1] <= 8192 else LowRankConfig(512, 2048, 4, 3, few_split=1024)


@FastLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x_ptr, a_ptr, ranks_ptr, rows_ptr, slots_ptr, h_ptr, K, num_rows, x_stride,
    MODULES: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(slots_ptr + tile)
    module = tl.program_id(1) % MODULES
    first_rank = tl.program_id(1) // MODULES * BLOCK_R
    begin = tl.program_id(2) * SPLIT
    rank = 0
    if slot >= 0:
        rank = tl.load(ranks_ptr + slot * MODULES + module)
    ranks = first_rank + tl.arange(0, BLOCK_R)
    has_rank = (ranks < rank)[:, None]
    a_at = a_ptr + ((slot.to(tl.int64) * MODULES + module) * RANK + ranks)[:, None] * K
    if first_rank < rank:
        ahead = tl.minimum(begin + tl.arange(0, SPLIT // LINE) * LINE, K - 1)
        prefetch(a_ptr + ((slot.to(tl.int64) * MODULES + module) * RANK + tl.minimum(ranks, rank - 1))[:, None] * K
                 + ahead[None, :], OVERLAPS)  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    if first_rank >= rank:
        return
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    has_row = rows >= 0
    total = dot_of_tile(
        x_ptr + rows.to(tl.int64)[:, None] * x_stride, a_at, has_row[:, None], has_rank, begin, K,
        BLOCK_M, BLOCK_R, BLOCK_K, SPLIT, NUM_STAGES,
    )  # fmt: skip
    h_at = h_ptr + ((tl.program_id(2) * num_rows + rows)[:, None] * MODULES + module) * RANK + ranks[None, :]
    tl.store(h_at, total, mask=has_row[:, None] & (ranks < RANK)[None, :])


@FastLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    h_ptr, b_ptr, ranks_ptr, rows_ptr, slots_ptr, y_ptr, N, second, third, num_rows, y_stride,
    MODULES: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIP: tl.constexpr, SPLITS: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """second, third: the first outputs of those modules, N if there are fewer; a strip belongs to one module."""
    tile = tl.program_id(0)
    begin = tl.program_id(1) * STRIP
    slot = tl.load(slots_ptr + tile)
    rank = 0
    module = (begin >= second).to(tl.int32) + (begin >= third).to(tl.int32)
    if slot >= 0:
        rank = tl.load(ranks_ptr + slot * MODULES + module)
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    has_row = rows >= 0
    wait_for_predecessor(OVERLAPS)
    if rank == 0:
        return
    ranks = tl.arange(0, BLOCK_R)
    in_rank = ranks < rank
    h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for split in tl.static_range(SPLITS):
        h_at = h_ptr + ((split * num_rows + rows)[:, None] * MODULES + module) * RANK + ranks[None, :]
        h += tl.load(h_at, mask=has_row[:, None] & in_rank[None, :], other=0.0)
    h = h.to(b_ptr.dtype.element_ty)
    for first in tl.range(begin, min(begin + STRIP, N), BLOCK_N, num_stages=NUM_STAGES):
        columns = first + tl.arange(0, BLOCK_N)
        inside = (columns < N)[None, :]
        b_at = b_ptr + (slot.to(tl.int64) * RANK + ranks)[:, None] * N + columns[None, :]
        b = tl.load(b_at, mask=inside & in_rank[:, None], other=0.0)
        y_at = y_ptr + rows.to(tl.int64)[:, None] * y_stride + columns[None, :]
        exists = has_row[:, None] & inside
        y = tl.load(y_at, mask=exists, other=0.0).to(tl.float32)
        y = tl.dot(h, b, y, input_precision="ieee")
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=exists)


def shrink(x: Tensor, weights: SlotWeights, tiles: RowTiles, config: LowRankConfig) -> Tensor:
    """Return split-K partials of h, float32 (num_splits, n, num_modules, max_rank), for rows x (n, in).

    Only rows with an adapter are written, up to its ranks. tiles: on the same device. Raises ValueError for shapes
    that do not belong together.
    """
    _, modules, rank, k = weights.a.shape
    if x.shape[1] != k or x.stride(1) != 1:
        raise ValueError(
            f"x {tuple(x.shape)} does not fit a {tuple(weights.a.shape)}, or its rows are not contiguous"
        )
    kernel, split, block_k = _shrink_kernel, config.split, config.block_k
    warps, stages = config.num_warps, config.num_stages
    if x.shape[0] <= MAX_FEW_ROWS:
        kernel, split, block_k = shrink_few_kernel, config.few_split, min(FEW_BLOCK_K, config.few_split)
        warps, stages = config.few_warps, FEW_STAGES
    splits = triton.cdiv(k, split)
    h = torch.empty(splits, x.shape[0], modules, rank, dtype=torch.float32, device=x.device)
    overlaps = overlaps_launches(x)
    kernel[(tiles.slots.shape[0], modules * triton.cdiv(rank, BLOCK_RANKS), splits)](
        x, weights.a, weights.ranks, tiles.rows, tiles.slots, h, k, x.shape[0], x.stride(0),
        MODULES=modules, RANK=rank, BLOCK_M=BLOCK_ROWS, BLOCK_R=BLOCK_RANKS, BLOCK_K=block_k, SPLIT=split,
        NUM_STAGES=stages, OVERLAPS=overlaps, num_warps=warps, launch_pdl=overlaps,
    )  # fmt: skip
    return h


def expand(y: Tensor, h: Tensor, weights: SlotWeights, tiles: RowTiles, config: LowRankConfig) -> None:
    """Add the adapters' outputs for `shrink`'s h to rows of y (n, out), in place. Raises ValueError as `shrink`."""
    n, starts = y.shape[1], weights.starts
    if n != weights.b.shape[2] or y.shape[0] != h.shape[1] or y.stride(1) != 1:
        raise ValueError(f"y {tuple(y.shape)} does not fit b {tuple(weights.b.shape)} and h {tuple(h.shape)}")
    modules, rank = h.shape[2:]
    is_few = y.shape[0] <= MAX_FEW_ROWS
    strip = strip_of_modules(starts, COLUMNS_OF_WARP if is_few else config.strip)
    second, third = (*starts[1:-1], n, n)[:2]
    overlaps = overlaps_launches(y)
    grid = tiles.slots.shape[0], triton.cdiv(n, strip)
    tensors = h, weights.b, weights.ranks, tiles.rows, tiles.slots, y, n, second, third, y.shape[0], y.stride(0)
    common = {"MODULES": modules, "RANK": rank, "BLOCK_M": BLOCK_ROWS, "STRIP": strip, "SPLITS": h.shape[0]}
    launch = {"OVERLAPS": overlaps, "launch_pdl": overlaps}
    if is_few:
        block_s = triton.next_power_of_2(h.shape[0])
        expand_few_kernel[grid](*tensors, **common, BLOCK_R=BLOCK_RANKS, BLOCK_S=block_s, **launch, num_warps=1)
    else:
        block_r = max(triton.next_power_of_2(rank), BLOCK_RANKS)
        _expand_kernel[grid](
            *tensors, **common, BLOCK_R=block_r, BLOCK_N=min(config.block_n, strip), NUM_STAGES=config.expand_stages,
            **launch, num_warps=config.expand_warps,
        )  # fmt: skip


def strip_of_modules(starts: tuple[int, ...], most: int) -> int:
    """Return the largest power of two up to `most` that divides all modules' starts. Raises ValueError below 16."""
    strip = gcd(*starts[1:-1], most)
    if strip < MIN_STRIP or len(starts) > MAX_MODULES + 1:
        raise ValueError(f"modules that end at {starts[1:]} cannot be one layer's")
    return strip


def low_rank_reference(y: Tensor, x: Tensor, weights: SlotWeights, slot_of_row: Tensor) -> Tensor:
    """Compute `shrink` and `expand` for y in double precision. slot_of_row: (n,), NOTHING without an adapter."""
    has_adapter = slot_of_row != NOTHING
    slots = slot_of_row.clamp(0).long()
    is_used = torch.arange(weights.a.shape[2], device=x.device) < weights.ranks[slots][:, :, None]
    h = torch.einsum("nk,nmrk->nmr", x.double(), weights.a.double()[slots]) * is_used
    sizes = torch.tensor([stop - start for start, stop in pairwise(weights.starts)], device=x.device)
    modules = torch.repeat_interleave(torch.arange(len(sizes), device=x.device), sizes)
    delta = torch.einsum("nor,nro->no", h[:, modules], weights.b.double()[slots])
    return y.double() + delta * has_adapter[:, None]
