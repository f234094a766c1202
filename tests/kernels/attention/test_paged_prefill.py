from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from kernels.gpu.attention.paged_prefill import TileSplits, paged_prefill, takes_boxes
from kernels.gpu.attention.prompt_tiles import LARGE_TILE, SMALL_TILE, Tile, choose_tile, prefill_tiles
from kernels.gpu.tuning import PrefillConfig
from kernels.paged_attention import attend_causally
from tests.kernels.helpers import (
    BFLOAT16_BOUND,
    HALF_DTYPE,
    block_tables_for,
    fill_sequence,
    give_back_blocks,
    poisoned_pool,
    relative_error,
    windowed_attention,
)

TILE_M = 16
CONFIG = PrefillConfig(tile_n=16, num_warps=4, num_stages=2)
Split = Callable[[list[Tile], int, int, int, torch.device], tuple[torch.Tensor, TileSplits]]
"""What splits tiles among programs. num_kv_heads, tile_m, head_dim, device: of the launch."""


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(7, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float32), (HALF_DTYPE, HALF_DTYPE), (HALF_DTYPE, torch.float8_e4m3fn)],
)
def test_chunks_against_cached_context(
    num_heads: int, num_kv_heads: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Rows: a whole prompt, a chunk after a cached prefix, one token."""
    head_dim, seq_lens, query_lens = 32, [21, 50, 33], [21, 13, 1]
    starts = [0, 21, 34, 35]
    tables, table = block_tables_for(seq_lens, block_size, device)
    pool = poisoned_pool(sum(map(len, tables)), 2, num_kv_heads, block_size, head_dim, kv_dtype, device)
    kvs = [fill_sequence(pool, 1, ids, seq_len) for ids, seq_len in zip(tables, seq_lens, strict=True)]
    q = torch.randn(starts[-1], num_heads + 2, head_dim, device=device).to(dtype)[:, :num_heads]
    tiles = prefill_tiles(starts, seq_lens, num_heads // num_kv_heads, TILE_M)
    out = torch.full((starts[-1], num_heads * head_dim), float("nan"), dtype=dtype, device=device)
    paged_prefill(q, pool, 1, table, torch.tensor(tiles, dtype=torch.int32, device=device), TILE_M, out, CONFIG)
    bound = 1e-5 if dtype == torch.float32 else BFLOAT16_BOUND
    for row, kv in enumerate(kvs):
        own = slice(starts[row], starts[row] + query_lens[row])
        assert relative_error(out[own], attend_causally(q[own].double(), *kv.double()).flatten(1)) < bound


def test_blocks_smaller_than_a_tile(device: torch.device) -> None:
    tables, table = block_tables_for([45], 8, device)
    pool = poisoned_pool(len(tables[0]), 1, 1, 8, 16, torch.float32, device)
    kv = fill_sequence(pool, 0, tables[0], 45)
    q = torch.randn(45, 2, 16, device=device)
    tiles = torch.tensor(prefill_tiles([0, 45], [45], 2, TILE_M), dtype=torch.int32, device=device)
    out = paged_prefill(q, pool, 0, table, tiles, TILE_M, None, CONFIG)
    assert relative_error(out, attend_causally(q, *kv).flatten(1)) < 1e-5


@pytest.mark.parametrize("has_boxes", [True, False])
@pytest.mark.parametrize("kv_dtype", [HALF_DTYPE, torch.float8_e4m3fn])
@pytest.mark.parametrize(("block_size", "tile_m"), [(64, SMALL_TILE), (128, LARGE_TILE)])
def test_large_blocks_through_a_descriptor(
    has_boxes: bool, kv_dtype: torch.dtype, block_size: int, tile_m: int, device: torch.device
) -> None:
    check_large_blocks(has_boxes, kv_dtype, block_size, tile_m, device)


def check_large_blocks(
    has_boxes: bool, kv_dtype: torch.dtype, block_size: int, tile_m: int, device: torch.device,
    split: Split | None = None,
) -> None:  # fmt: skip
    """Other layers, heads and blocks are NaN, so that a load from the wrong place shows."""
    seq_lens, starts = [170, 290], [0, 30, 50]
    tables, table = block_tables_for(seq_lens, block_size, device)
    pool = poisoned_pool(sum(map(len, tables)), 2, 2, block_size, 32, kv_dtype, device)
    kvs = [fill_sequence(pool, 1, ids, seq_len) for ids, seq_len in zip(tables, seq_lens, strict=True)]
    q = torch.randn(50, 6, 32, device=device).to(HALF_DTYPE)
    listed, splits = prefill_tiles(starts, seq_lens, 3, tile_m), None
    tiles = torch.tensor(listed, dtype=torch.int32, device=device)
    assert takes_boxes(pool) or device.type == "cuda"
    has_boxes = has_boxes and takes_boxes(pool)
    if split is not None:
        tiles, splits = split(listed, 2, tile_m, 32, device)
    out = paged_prefill(q, pool, 1, table, tiles, tile_m, has_boxes=has_boxes, splits=splits)
    for row, kv in enumerate(kvs):
        own = slice(starts[row], starts[row + 1])
        expected = attend_causally(q[own].double(), *kv.double())
        assert relative_error(out[own], expected.flatten(1)) < BFLOAT16_BOUND


@pytest.mark.parametrize("tile_m", [SMALL_TILE, LARGE_TILE])
def test_heads_of_256(tile_m: int, device: torch.device) -> None:
    tables, table = block_tables_for([150], 64, device)
    pool = poisoned_pool(len(tables[0]), 2, 1, 64, 256, HALF_DTYPE, device)
    kv = fill_sequence(pool, 1, tables[0], 150)
    q = torch.randn(40, 2, 256, device=device).to(HALF_DTYPE)
    tiles = torch.tensor(prefill_tiles([0, 40], [150], 2, tile_m), dtype=torch.int32, device=device)
    for window in (0, 70):
        out = paged_prefill(q, pool, 1, table, tiles, tile_m, window=window)
        expected = windowed_attention(q.double(), kv[0].double(), kv[1].double(), window)
        assert relative_error(out, expected.flatten(1)) < BFLOAT16_BOUND


def test_small_blocks_and_wide_numbers_do_not_come_through_a_descriptor() -> None:
    assert takes_boxes(torch.empty(1, 1, 2, 1, 64, 16, dtype=torch.bfloat16))
    assert not takes_boxes(torch.empty(1, 1, 2, 1, 16, 16, dtype=torch.bfloat16))
    assert not takes_boxes(torch.empty(1, 1, 2, 1, 64, 16))


def test_large_tiles_are_for_launches_that_fill_the_gpu() -> None:
    sizes = [choose_tile(num_tokens, 16, torch.device("cpu")) for num_tokens in (1, 95, 96, 10_000)]
    assert sizes == [SMALL_TILE, SMALL_TILE, LARGE_TILE, LARGE_TILE]


def test_tiles_cover_each_token_once_longest_first() -> None:
    starts, seq_lens = [0, 21, 21, 34], [21, 9, 50]
    tiles = prefill_tiles(starts, seq_lens, 3, 16)
    covered = sorted(token for _, first, _, count in tiles for token in range(first, first + count))
    assert covered == list(range(34))
    assert [tile[2] for tile in tiles] == sorted((tile[2] for tile in tiles), reverse=True)
    by_first = {first: (row, position) for row, first, position, _ in tiles}
    assert by_first[0] == (0, 0)
    assert by_first[21] == (2, 37)


@pytest.mark.parametrize(("block_size", "tile_n", "has_boxes"), [(16, 16, False), (8, 32, False), (64, 64, True)])
@pytest.mark.parametrize(("window", "has_sinks"), [(1, False), (40, True), (500, True)])
def test_windows_and_sinks(
    window: int, has_sinks: bool, block_size: int, tile_n: int, has_boxes: bool, device: torch.device
) -> None:
    check_windows_and_sinks(window, has_sinks, block_size, tile_n, has_boxes, device)


def check_windows_and_sinks(
    window: int, has_sinks: bool, block_size: int, tile_n: int, has_boxes: bool, device: torch.device,
    split: Split | None = None,
) -> None:  # fmt: skip
    """Blocks before a window are not read: their table entries are out of range."""
    num_heads, num_kv_heads, seq_lens, starts = 4, 2, [21, 190, 133], [0, 21, 71, 72]
    dtype = HALF_DTYPE if has_boxes else torch.float32
    tables, table = block_tables_for(seq_lens, block_size, device)
    pool = poisoned_pool(sum(map(len, tables)), 2, num_kv_heads, block_size, 32, dtype, device)
    kvs = [fill_sequence(pool, 1, ids, seq_len) for ids, seq_len in zip(tables, seq_lens, strict=True)]
    num_queries = [stop - start for start, stop in pairwise(starts)]
    first_keys = [max(seq_len - count - window + 1, 0) for seq_len, count in zip(seq_lens, num_queries, strict=True)]
    give_back_blocks(pool, tables, table, first_keys if window else [0] * 3)
    q = torch.randn(starts[-1], num_heads, 32, device=device).to(dtype)
    sinks = 2 * torch.randn(num_heads, device=device) if has_sinks else None
    listed, splits = prefill_tiles(starts, seq_lens, 2, TILE_M), None
    tiles = torch.tensor(listed, dtype=torch.int32, device=device)
    if split is not None:
        tiles, splits = split(listed, num_kv_heads, TILE_M, 32, device)
    config = PrefillConfig(tile_n=tile_n, num_warps=4, num_stages=2)
    out = paged_prefill(
        q, pool, 1, table, tiles, TILE_M, None, config, has_boxes and takes_boxes(pool), window, sinks, splits
    )  # fmt: skip
    for row, kv in enumerate(kvs):
        own = slice(starts[row], starts[row + 1])
        expected = windowed_attention(q[own].double(), kv[0].double(), kv[1].double(), window, sinks)
        assert relative_error(out[own], expected.flatten(1)) < (BFLOAT16_BOUND if has_boxes else 1e-5)
