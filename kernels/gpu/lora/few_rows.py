"""Shrink and expand of `low_rank.py` for a step of few rows, where most tiles have a row or two.

Padded to a tile of tensor cores, such rows would take longer to load and store than the adapter's weights. So they
are multiplied without tensor cores, two at a time. Shrink loads its part of A into registers before it waits for the
previous kernel. Tiles with more rows take tensor cores in the same launch.

Reference: `low_rank_reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import FastLaunch, prefetch, wait_for_predecessor

FEW_ROWS = tl.constexpr(4)  # per tile
LINE = tl.constexpr(64)  # 16-bit numbers in a line of the L2 cache


@triton.jit
def dot_of_tile(x_at, a_at, has_row, has_rank, begin, K, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
                BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, NUM_STAGES: tl.constexpr):  # fmt: skip
    """Multiply the columns from `begin` of a tile's rows of x and an adapter's rows of A: (BLOCK_M, BLOCK_R)."""
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for first in tl.range(begin, min(begin + SPLIT, K), BLOCK_K, num_stages=NUM_STAGES):
        ks = first + tl.arange(0, BLOCK_K)
        inside = (ks < K)[None, :]
        x = tl.load(x_at + ks[None, :], mask=has_row & inside, other=0.0)
        a = tl.load(a_at + ks[None, :], mask=has_rank & inside, other=0.0)
        total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
    return total


@FastLaunch
@triton.jit(do_not_specialize=["num_rows"])
def shrink_few_kernel(
    x_ptr, a_ptr, ranks_ptr, rows_ptr, slots_ptr, h_ptr, K, num_rows, x_stride,
    MODULES: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Shrink a tile of a few rows. Arguments: see `_shrink_kernel`, whose loop fuller tiles take."""
    tile = tl.program_id(0)
    slot = tl.load(slots_ptr + tile)
    module = tl.program_id(1) % MODULES
    first_rank = tl.program_id(1) // MODULES * BLOCK_R
    begin = tl.program_id(2) * SPLIT
    rank = 0
    if slot >= 0:
        rank = tl.load(ranks_ptr + slot * MODULES + module)
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    count = tl.sum((rows >= 0).to(tl.int32), 0)
    ranks = first_rank + tl.arange(0, BLOCK_R)
    a_at = a_ptr + ((slot.to(tl.int64) * MODULES + module) * RANK + ranks)[:, None] * K
    columns = begin + tl.arange(0, SPLIT)
    exists = columns < K
    a = tl.load(
        a_at + columns[None, :], mask=(ranks < rank)[:, None] & exists[None, :] & (count <= FEW_ROWS), other=0.0
    )
    wait_for_predecessor(OVERLAPS)
    if first_rank >= rank:
        return
    h_at = h_ptr + (tl.program_id(2) * num_rows * MODULES + module) * RANK
    if count > FEW_ROWS:
        has_row = rows >= 0
        total = dot_of_tile(
            x_ptr + rows.to(tl.int64)[:, None] * x_stride, a_at, has_row[:, None], (ranks < rank)[:, None], begin, K,
            BLOCK_M, BLOCK_R, BLOCK_K, SPLIT, NUM_STAGES,
        )  # fmt: skip
        at = h_at + rows[:, None] * (MODULES * RANK) + ranks[None, :]
        tl.store(at, total, mask=has_row[:, None] & (ranks < RANK)[None, :])
    else:
        wide = a.to(tl.float32)
        for index in range(0, count, 2):
            row = tl.load(rows_ptr + tile * BLOCK_M + index)
            other = tl.load(rows_ptr + tile * BLOCK_M + index + 1)
            x = tl.load(x_ptr + row.to(tl.int64) * x_stride + columns, mask=exists, other=0.0)
            x_of_other = tl.load(
                x_ptr + other.to(tl.int64) * x_stride + columns, mask=exists & (other >= 0), other=0.0
            )
            h = tl.sum(wide * x.to(tl.float32)[None, :], 1)
            h_of_other = tl.sum(wide * x_of_other.to(tl.float32)[None, :], 1)
            tl.store(h_at + row * (MODULES * RANK) + ranks, h, mask=ranks < RANK)
            tl.store(h_at + other * (MODULES * RANK) + ranks, h_of_other, mask=(ranks < RANK) & (other >= 0))


@triton.jit
def _row_of_h(h_ptr, row, num_rows, module, first_rank, rank, MODULES: tl.constexpr, RANK: tl.constexpr,
              BLOCK_R: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """Load a row of h (BLOCK_R,), zeros beyond the rank, or without a row."""
    ranks = first_rank + tl.arange(0, BLOCK_R)[None, :]
    splits = tl.arange(0, BLOCK_S)[:, None]
    h_at = h_ptr + ((splits * num_rows + row) * MODULES + module) * RANK + ranks
    return tl.sum(tl.load(h_at, mask=(ranks < rank) & (splits < SPLITS) & (row >= 0), other=0.0), 0)


@triton.jit
def _add_to_row(y_ptr, row, columns, delta, N, y_stride):
    """Add `delta` to a row of y, if it exists."""
    y_at = y_ptr + row.to(tl.int64) * y_stride + columns
    exists = (columns < N) & (row >= 0)
    y = tl.load(y_at, mask=exists, other=0.0).to(tl.float32) + delta
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=exists)


@FastLaunch
@triton.jit(do_not_specialize=["num_rows"])
def expand_few_kernel(
    h_ptr, b_ptr, ranks_ptr, rows_ptr, slots_ptr, y_ptr, N, second, third, num_rows, y_stride,
    MODULES: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, STRIP: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Expand a tile of a few rows. Arguments: see `_expand_kernel`."""
    tile = tl.program_id(0)
    begin = tl.program_id(1) * STRIP
    slot = tl.load(slots_ptr + tile)
    rank = 0
    module = (begin >= second).to(tl.int32) + (begin >= third).to(tl.int32)
    if slot >= 0:
        rank = tl.load(ranks_ptr + slot * MODULES + module)
    rows = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    count = tl.sum((rows >= 0).to(tl.int32), 0)
    columns = begin + tl.arange(0, STRIP)
    inside = (columns < N)[None, :]
    ranks = tl.arange(0, BLOCK_R)
    b_at = b_ptr + (slot.to(tl.int64) * RANK + ranks[:, None]) * N + columns[None, :]
    LINES: tl.constexpr = (STRIP + LINE - 1) // LINE
    if rank > 0:
        prefetch(b_ptr + (slot.to(tl.int64) * RANK + tl.minimum(ranks, rank - 1)[:, None]) * N
                 + tl.minimum(begin + tl.arange(0, LINES) * LINE, N - 1)[None, :], OVERLAPS)  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    if rank == 0:
        return
    if count > FEW_ROWS:
        has_row = (rows >= 0)[:, None]
        y_at = y_ptr + rows.to(tl.int64)[:, None] * y_stride + columns[None, :]
        total = tl.load(y_at, mask=has_row & inside, other=0.0).to(tl.float32)
        for first_rank in range(0, rank, BLOCK_R):
            in_rank = first_rank + ranks < rank
            h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for split in range(SPLITS):
                h_at = h_ptr + ((split * num_rows + rows)[:, None] * MODULES + module) * RANK + first_rank
                h += tl.load(h_at + ranks[None, :], mask=has_row & in_rank[None, :], other=0.0)
            b = tl.load(b_at + first_rank * N, mask=in_rank[:, None] & inside, other=0.0)
            total = tl.dot(h.to(b.dtype), b, total, input_precision="ieee")
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=has_row & inside)
    else:
        for index in range(0, count, 2):
            row = tl.load(rows_ptr + tile * BLOCK_M + index)
            other = tl.load(rows_ptr + tile * BLOCK_M + index + 1)
            delta = tl.zeros((STRIP,), tl.float32)
            delta_of_other = tl.zeros((STRIP,), tl.float32)
            for first_rank in range(0, rank, BLOCK_R):
                in_rank = (first_rank + ranks < rank)[:, None]
                b = tl.load(b_at + first_rank * N, mask=in_rank & inside, other=0.0)
                h = _row_of_h(h_ptr, row, num_rows, module, first_rank, rank, MODULES, RANK, BLOCK_R, SPLITS, BLOCK_S)
                h_of_other = _row_of_h(
                    h_ptr, other, num_rows, module, first_rank, rank, MODULES, RANK, BLOCK_R, SPLITS, BLOCK_S
                )
                h, h_of_other = h.to(b.dtype).to(tl.float32), h_of_other.to(b.dtype).to(tl.float32)
                b = b.to(tl.float32)
                delta += tl.sum(b * h[:, None], 0)
                delta_of_other += tl.sum(b * h_of_other[:, None], 0)
            _add_to_row(y_ptr, row, columns, delta, N, y_stride)
            _add_to_row(y_ptr, other, columns, delta_of_other, N, y_stride)
