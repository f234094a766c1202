"""Divides the keys of a decode step among programs, on the device, once a step for all layers with the same window.

The tiles of all rows form one sequence, row after row. Each program of a KV head takes an equal run of it (Stream-K):
the rest of one row, whole rows, the first tiles of another. So all programs are busy to the end, however uneven the
rows are. Where splitting each row into equal parts takes about as long, runs begin with rows instead, and fewer rows
need the combine kernel.

Attention kernels read the plan before they wait for the previous kernel. So the plan must be in memory before any
later kernel starts: the kernel here lets its successor start only after its stores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import (
    FastLaunch,
    let_successor_start,
    num_multiprocessors,
    overlaps_launches,
    wait_first,
)
from kernels.gpu.tuning import DECODE, DecodeConfig, found

MIN_RUN = tl.constexpr(32)  # least keys of a program: with more splits, combining costs more than they save
MAX_SPLITS = tl.constexpr(128)  # of a row, one more where runs do not begin with rows
NEXT_ROW = tl.constexpr(64)  # keys that a program could read in the time it takes to start another row
USUAL_QUERIES = 4  # of a row with several queries: converts a number of queries to rows
# Fields of a program: its first and last row, tiles of the first row that earlier programs take, tiles of its run,
# keys of the first row. Fields of a row (or query): first and last program (first > last: padding), and its place in
# its group.
PROGRAM_FIELDS, ROW_FIELDS = tl.constexpr(8), tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """of_programs: int32 (programs of each KV head, 8). of_rows: int32 (rows or queries, 4).

    queries: the largest number in one group that attends together. window: keys that a query sees; 0: all.
    """

    config: DecodeConfig
    of_programs: Tensor
    of_rows: Tensor
    window: int = 0
    queries: int = 1

    @property
    def num_programs(self) -> int:
        return self.of_programs.shape[0]


def tuned_rows(num_rows: int) -> int:
    """Round up to the rows of a captured step, so that settings, and compiled kernels, are shared with it."""
    if num_rows <= 16:
        return 1 << (num_rows - 1).bit_length()
    step = 8 if num_rows <= 64 else 16 if num_rows <= 128 else 32
    return -(-num_rows // step) * step


def usual_groups(num_queries: int, most_queries: int) -> int:
    """Estimate the number of query groups, which is unknown when a graph is captured."""
    return -(-num_queries // min(most_queries, USUAL_QUERIES))


def decode_config(num_rows: int, num_kv_heads: int, group: int, itemsize: int, head_dim: int = 128) -> DecodeConfig:
    """Look up the settings. itemsize: bytes of a number in K and V. group: query heads of a KV head."""
    programs = tuned_rows(num_rows) * num_kv_heads
    return found(DECODE.find(programs=programs, group=group, itemsize=itemsize, head_dim=head_dim))


def num_programs(num_kv_heads: int, device: torch.device, config: DecodeConfig) -> int:
    """Return the programs that share one KV head's keys, so that all heads together fill the GPU."""
    return max(1, config.programs_per_sm * num_multiprocessors(device) // num_kv_heads)


@triton.jit
def skipped_tiles(lengths, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Count the tiles before the one with the window's first key."""
    return tl.maximum(lengths - WINDOW, 0) // TILE if WINDOW > 0 else 0


@triton.jit
def tiles_of(lengths, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Count the tiles of keys that rows of these lengths read, from the window's first key on."""
    return tl.cdiv(lengths, TILE) - skipped_tiles(lengths, TILE, WINDOW)


@triton.jit
def _partition(tiles, num_programs, TILE: tl.constexpr):
    """Return the tiles of each program's run, and the first tile of each row. tiles: of each row, int32 (ROWS,)."""
    next_row: tl.constexpr = (NEXT_ROW + TILE - 1) // TILE
    longest = tl.max(tiles, axis=0)
    least = tl.maximum(tl.cdiv(longest, MAX_SPLITS), (MIN_RUN + TILE - 1) // TILE)
    run = tl.maximum(tl.cdiv(tl.sum(tiles, axis=0), num_programs), least)
    splits = num_programs // tl.maximum(tl.sum((tiles > 0).to(tl.int32), axis=0), 1)
    even = tl.maximum(tl.cdiv(longest, tl.maximum(splits, 1)), least)
    # If runs begin anywhere, most programs start a second row, and nearly all rows are combined.
    is_even = (splits > 0) & (even <= run + next_row + run // 16)
    # With an even split, each row takes up the same number of runs.
    taken = tl.where(is_even, (tiles > 0).to(tl.int32) * (splits * even), tiles)
    return tl.where(is_even, even, run), tl.cumsum(taken, axis=0) - taken


@triton.jit
def _number_at(numbers, place, ROWS: tl.constexpr):
    """Return numbers[place], or 0 outside of (ROWS,)."""
    return tl.sum(tl.where(tl.arange(0, ROWS) == place, numbers, 0), axis=0)


@FastLaunch
@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _plan_kernel(
    lengths_ptr, leaders_ptr, counts_ptr, programs_ptr, rows_ptr, num_rows, num_programs,
    QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the fields of program `index` and of row `index`."""
    index = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    wait_first(OVERLAPS)
    if QUERIES > 1:
        counts = tl.load(counts_ptr + rows, mask=rows < num_rows, other=0)
        leaders = tl.load(leaders_ptr + rows, mask=rows < num_rows, other=0)
        lengths = tl.load(lengths_ptr + leaders, mask=counts > 0, other=0).to(tl.int32)
        row = tl.sum(((counts > 0) & (leaders <= index)).to(tl.int32), axis=0) - 1
        place = index - _number_at(leaders, row, ROWS)
        is_padding = tl.load(lengths_ptr + index, mask=index < num_rows, other=0) == 0
    else:
        lengths = tl.load(lengths_ptr + rows, mask=rows < num_rows, other=0).to(tl.int32)
        row, place, is_padding = index, 0, _number_at(lengths, index, ROWS) == 0
    tiles = tiles_of(lengths, TILE, WINDOW)
    run, starts = _partition(tiles, num_programs, TILE)

    begin = index * run
    is_mine = (tiles > 0) & (starts < begin + run) & (starts + tiles > begin)
    first, last = tl.min(tl.where(is_mine, rows, ROWS), axis=0), tl.max(tl.where(is_mine, rows, -1), axis=0)
    taken = tl.maximum(begin - _number_at(starts, first, ROWS), 0)
    fields_ptr, exists = programs_ptr + index * PROGRAM_FIELDS, index < num_programs
    tl.store(fields_ptr, tl.where(last < 0, 0, first), mask=exists)
    tl.store(fields_ptr + 1, last, mask=exists)
    tl.store(fields_ptr + 2, taken, mask=exists)
    tl.store(fields_ptr + 3, run, mask=exists)
    tl.store(fields_ptr + 4, _number_at(lengths, first, ROWS), mask=exists)

    start, count = _number_at(starts, row, ROWS), _number_at(tiles, row, ROWS)
    fields_ptr, exists = rows_ptr + index * ROW_FIELDS, index < num_rows
    tl.store(fields_ptr, start // run, mask=exists)
    tl.store(fields_ptr + 1, tl.where(is_padding, -1, (start + count - 1) // run), mask=exists)
    tl.store(fields_ptr + 2, place, mask=exists)
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r", [index], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
    let_successor_start(OVERLAPS)


def make_plan(
    lengths: Tensor, config: DecodeConfig, programs: int, window: int = 0, groups: Tensor | None = None,
    queries: int = 1,
) -> DecodePlan:  # fmt: skip
    """Plan for rows of these lengths, int32 (num_rows,), 0 for padding. programs: for each KV head.

    groups: of rows with several queries, see `paged_verify`; `lengths` is then its first row.
    """
    num_rows, device = lengths.shape[0], lengths.device
    of_programs = torch.empty(programs, PROGRAM_FIELDS.value, dtype=torch.int32, device=device)
    of_rows = torch.empty(num_rows, ROW_FIELDS.value, dtype=torch.int32, device=device)
    leaders, counts = (lengths, lengths) if groups is None else (groups[1], groups[2])
    overlaps = overlaps_launches(lengths)
    _plan_kernel[(max(programs, num_rows),)](
        lengths, leaders, counts, of_programs, of_rows, num_rows, programs,
        QUERIES=queries, TILE=config.tile, WINDOW=window,
        ROWS=max(32, triton.next_power_of_2(tuned_rows(num_rows))), OVERLAPS=overlaps, num_warps=1,
        launch_pdl=overlaps,
    )  # fmt: skip
    return DecodePlan(config, of_programs, of_rows, window, queries)


def plan_decode(
    lengths: Tensor, num_heads: int, pool: Tensor, window: int = 0, groups: Tensor | None = None, queries: int = 1
) -> DecodePlan:
    """Plan `paged_decode` over `pool`; with `groups`, `paged_verify`. queries: the most in one group."""
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    rows = usual_groups(lengths.shape[0], queries)
    config = decode_config(rows, num_kv_heads, num_heads // num_kv_heads, pool.itemsize, head_dim)
    programs = num_programs(num_kv_heads, lengths.device, config)
    if window:
        programs = min(programs, lengths.shape[0] * (window // MIN_RUN.value + 2))  # no more have keys
    return make_plan(lengths, config, programs, window, groups, queries)
