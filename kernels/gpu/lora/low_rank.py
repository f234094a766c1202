"""What adapters add to a layer, on a GPU: y[i] += B[s_i] (A[s_i] x[i]), where s_i is the slot of row i's adapter.

    shrink   h[i] = A[s_i] x[i]       A: (num_slots, rank, in), rows beyond an adapter's rank are zero
    expand   y[i] += B[s_i] h[i]      B: (num_slots, out, rank), scaled, columns beyond an adapter's rank are zero

One launch each for the rows of all adapters, by tiles of rows of one adapter (`row_tiles.py`): programs of empty
tiles end at once, and rows without an adapter are not touched. Sums are in float32, and so is h. Shrink has few rows
of A and many columns: programs may divide the columns, and expand adds up their parts of h, always in one order.
Reference: `low_rank_reference`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching.fast_launch import FastLaunch
from kernels.gpu.lora.row_tiles import BLOCK_ROWS, NOTHING, RowTiles


class LowRankConfig(NamedTuple):
    """block_k: columns of x at a time. split: those of a program of shrink; 0: all, which alone a GPU has measured.

    block_n: outputs of a program of expand.
    """

    block_k: int = 512
    split: int = 0
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 3


@FastLaunch
@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, rows_ptr, slots_ptr, h_ptr, K, num_rows, x_stride,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(slots_ptr + tile)
    if slot < 0:
        return
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    has_row = rows >= 0
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    a_at = a_ptr + (slot.to(tl.int64) * RANK + ranks)[:, None] * K
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    begin = tl.program_id(2) * SPLIT
    for first in tl.range(begin, min(begin + SPLIT, K), BLOCK_K, num_stages=NUM_STAGES):
        ks = first + tl.arange(0, BLOCK_K)
        inside = (ks < K)[None, :]
        x = tl.load(x_at + ks[None, :], mask=has_row[:, None] & inside, other=0.0)
        a = tl.load(a_at + ks[None, :], mask=(ranks < RANK)[:, None] & inside, other=0.0)
        total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
    h_at = h_ptr + (tl.program_id(2) * num_rows + rows)[:, None] * RANK + ranks[None, :]
    tl.store(h_at, total, mask=has_row[:, None] & (ranks < RANK)[None, :])


@FastLaunch
@triton.jit
def _expand_kernel(
    h_ptr, b_ptr, rows_ptr, slots_ptr, y_ptr, N, num_rows, y_stride,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(slots_ptr + tile)
    if slot < 0:
        return
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    has_row = rows >= 0
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, RANK, BLOCK_R):
        ranks = first + tl.arange(0, BLOCK_R)
        in_rank = (ranks < RANK)[None, :]
        h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in tl.static_range(SPLITS):
            h_at = h_ptr + (split * num_rows + rows)[:, None] * RANK + ranks[None, :]
            h += tl.load(h_at, mask=has_row[:, None] & in_rank, other=0.0)
        b_at = b_ptr + (slot.to(tl.int64) * N + columns)[:, None] * RANK + ranks[None, :]
        b = tl.load(b_at, mask=inside[:, None] & in_rank, other=0.0)
        total = tl.dot(h.to(b.dtype), tl.trans(b), total, input_precision="ieee")
    y_at = y_ptr + rows.to(tl.int64)[:, None] * y_stride + columns[None, :]
    exists = has_row[:, None] & inside[None, :]
    y = tl.load(y_at, mask=exists, other=0.0).to(tl.float32) + total
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=exists)


def add_low_rank(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, tiles: RowTiles, config: LowRankConfig = LowRankConfig()  # noqa: B008
) -> None:  # fmt: skip
    """Add to rows of y (n, out) what their adapters make of rows of x (n, in), in place.

    a: (num_slots, rank, in). b: (num_slots, out, rank). tiles: on the same device. Raises ValueError for shapes that
    do not belong together.
    """
    num_slots, rank, k = a.shape
    n = y.shape[1]
    if b.shape != (num_slots, n, rank) or x.shape != (y.shape[0], k):
        raise ValueError(f"y {tuple(y.shape)}, x {tuple(x.shape)}, a {tuple(a.shape)}, b {tuple(b.shape)} do not fit")
    if not (a.is_contiguous() and b.is_contiguous() and x.stride(1) == 1 and y.stride(1) == 1):
        raise ValueError("a and b must be contiguous, and rows of x and y")
    count = tiles.slots.shape[0]
    split = config.split or triton.cdiv(k, config.block_k) * config.block_k
    splits = triton.cdiv(k, split)
    h = torch.empty(splits, x.shape[0], rank, dtype=torch.float32, device=x.device)
    block_r = min(max(triton.next_power_of_2(rank), 16), 64)
    _shrink_kernel[(count, triton.cdiv(rank, block_r), splits)](
        x, a, tiles.rows, tiles.slots, h, k, x.shape[0], x.stride(0),
        RANK=rank, BLOCK_M=BLOCK_ROWS, BLOCK_R=block_r, BLOCK_K=config.block_k, SPLIT=split,
        NUM_STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    _expand_kernel[(count, triton.cdiv(n, config.block_n))](
        h, b, tiles.rows, tiles.slots, y, n, x.shape[0], y.stride(0),
        RANK=rank, BLOCK_M=BLOCK_ROWS, BLOCK_R=block_r, BLOCK_N=config.block_n, SPLITS=splits,
        num_warps=config.num_warps,
    )  # fmt: skip


def low_rank_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, slot_of_row: Tensor) -> Tensor:
    """What `add_low_rank` makes of y, in double precision. slot_of_row: (n,), NOTHING for rows without an adapter."""
    has_adapter = slot_of_row != NOTHING
    slots = slot_of_row.clamp(0).long()
    h = torch.einsum("nk,nrk->nr", x.double(), a.double()[slots])
    return y.double() + torch.einsum("nr,nor->no", h, b.double()[slots]) * has_adapter[:, None]
