from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.attention.simple_decode import simple_decode
from kernels.gpu.attention.decode_plan import DecodePlan, decode_config, make_plan, num_programs, plan_decode
from kernels.gpu.attention.decode_tiles import LISTED_BLOCKS
from kernels.gpu.attention.kv_splits import DecodeWorkspace
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.tuning import (
    FEW_HEADS,
    LONG_TILES,
    MANY_PROGRAMS,
    SHORT_TILES,
    WHOLE_ROWS,
    WIDE_HEADS,
    DecodeConfig,
)
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

LAYER = 1
SMALL = DecodeConfig(16, 4, 2, 2)
LISTS_BLOCKS = DecodeConfig(16, 4, 2, 2, lists_blocks=True)


def plan_of(
    lengths: Tensor, num_heads: int, pool: Tensor, config: DecodeConfig | None = None, programs: int | None = None,
    window: int = 0,
) -> DecodePlan:  # fmt: skip
    """Return a plan with the given settings and programs, otherwise with chosen ones."""
    chosen = plan_decode(lengths, num_heads, pool, window)
    config = config or chosen.config
    return make_plan(lengths, config, programs or num_programs(pool.shape[3], lengths.device, config), window)


def run(
    seq_lens: list[int], num_heads: int, num_kv_heads: int, block_size: int, dtype: torch.dtype,
    device: torch.device, programs: int | None, head_dim: int = 32, kv_dtype: torch.dtype | None = None,
    config: DecodeConfig | None = SMALL, window: int = 0,
) -> None:  # fmt: skip
    tables, table = block_tables_for(seq_lens, block_size, device)
    pool = poisoned_pool(sum(map(len, tables)), 2, num_kv_heads, block_size, head_dim, kv_dtype or dtype, device)
    kvs = [fill_sequence(pool, LAYER, ids, seq_len) for ids, seq_len in zip(tables, seq_lens, strict=True)]
    qkv = torch.randn(len(seq_lens), num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    q = qkv[:, :num_heads]
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    plan = plan_of(lengths, num_heads, pool, config, programs, window)
    workspace = DecodeWorkspace(
        len(seq_lens), num_heads, num_kv_heads, head_dim, device, programs=plan.num_programs
    )  # fmt: skip
    workspace.outputs.fill_(float("nan"))
    workspace.log_sums.fill_(float("nan"))
    expected = torch.cat(
        [
            windowed_attention(q[row : row + 1].double(), kv[0].double(), kv[1].double(), window).flatten(1)
            if kv.shape[2]
            else torch.zeros(1, num_heads * head_dim, dtype=torch.float64, device=device)  # padding
            for row, kv in enumerate(kvs)
        ]
    )
    bound = 1e-5 if dtype == torch.float32 else BFLOAT16_BOUND
    out = paged_decode(q, pool, LAYER, table, lengths, plan, workspace)
    assert relative_error(out, expected) < bound
    if not window and all(seq_lens):
        assert relative_error(simple_decode(q, pool, LAYER, table, lengths), expected) < bound


@pytest.mark.parametrize("programs", [1, 3, 4, None])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(7, 1), (4, 2)])
def test_equals_the_reference(programs: int | None, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
    run([1, 16, 17, 70], num_heads, num_kv_heads, 16, HALF_DTYPE, device, programs)


@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
@pytest.mark.parametrize("programs", [1, 4])
def test_eight_bit_keys_and_values(dtype: torch.dtype, programs: int, device: torch.device) -> None:
    """The reference reads the same stored numbers, so their rounding does not count as the kernel's error."""
    run([1, 17, 70], 7, 1, 16, dtype, device, programs, kv_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (16, 8, 128)])
def test_shapes_of_small_models(num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
    run([40, 130], num_heads, num_kv_heads, 64, HALF_DTYPE, device, None, head_dim)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_blocks_larger_and_smaller_than_a_tile(block_size: int, device: torch.device) -> None:
    run([75], 2, 1, block_size, torch.float32, device, 2)


@pytest.mark.parametrize(
    ("block_size", "seq_len", "programs"), [(16, 16 * 64, 1), (16, 16 * 64 + 1, 1), (32, 4200, 2)]
)
def test_more_blocks_than_a_program_lists_at_a_time(
    block_size: int, seq_len: int, programs: int, device: torch.device
) -> None:
    """Also if a program's first tile lies inside a block: 4,200 keys are 263 tiles, 132 of the first program."""
    assert seq_len // block_size // programs >= LISTED_BLOCKS.value
    run([seq_len, 40], 2, 1, block_size, torch.float32, device, programs, config=LISTS_BLOCKS)


def test_shares_that_begin_inside_a_block(device: torch.device) -> None:
    run([75, 16, 200], 2, 1, 64, torch.float32, device, 3, config=LISTS_BLOCKS)


@pytest.mark.parametrize("programs", [1, 5, 16])
@pytest.mark.parametrize("window", [0, 40])
def test_uneven_rows_and_padding_between_them(programs: int, window: int, device: torch.device) -> None:
    """Programs compute a part of a row, several rows, or nothing."""
    run([300, 0, 5, 0, 17, 90, 1, 33], 4, 2, 16, torch.float32, device, programs, window=window)


def test_blocks_smaller_than_a_tile(device: torch.device) -> None:
    seq_lens = [1, 40, 64]
    tables, table = block_tables_for(seq_lens, 16, device)
    pool = poisoned_pool(sum(map(len, tables)), 1, 1, 16, 16, torch.float32, device)
    kvs = [fill_sequence(pool, 0, ids, seq_len) for ids, seq_len in zip(tables, seq_lens, strict=True)]
    q = torch.randn(3, 2, 16, device=device)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace(3, 2, 1, 16, device)
    plan = make_plan(lengths, DecodeConfig(32, 2, 3, 2), 1)
    out = paged_decode(q, pool, 0, table, lengths, plan, workspace)
    for row, kv in enumerate(kvs):
        assert relative_error(out[row], attend_causally(q[row : row + 1], *kv).flatten()) < 1e-5


def test_padding_rows_get_zeros(device: torch.device) -> None:
    pool = torch.randn(1, 1, 2, 1, 16, 16, device=device)
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace(2, 2, 1, 16, device)
    lengths = torch.tensor([0, 1], dtype=torch.int32, device=device)
    plan = plan_decode(lengths, 2, pool)
    out = paged_decode(torch.randn(2, 2, 16, device=device), pool, 0, table, lengths, plan, workspace)
    assert not out[0].any()
    assert torch.allclose(out[1].view(2, 16), pool[0, 0, 1, 0, 0].expand(2, 16))


@pytest.mark.parametrize("config", [LONG_TILES, SHORT_TILES, MANY_PROGRAMS, FEW_HEADS, None])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (7, 1)])
def test_what_is_chosen_fits(
    config: DecodeConfig | None, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    run([1, 40, 75], num_heads, num_kv_heads, 16, HALF_DTYPE, device, None, config=config)


def test_settings_go_by_programs_and_group() -> None:
    assert decode_config(96, 8, 2, 2) is decode_config(72, 4, 7, 2) is SHORT_TILES
    assert decode_config(64, 8, 2, 2) is decode_config(128, 4, 7, 2) is WHOLE_ROWS
    assert decode_config(256, 8, 2, 2) is decode_config(256, 4, 7, 2) is MANY_PROGRAMS
    assert decode_config(1, 4, 7, 2) is decode_config(64, 4, 7, 2) is LONG_TILES
    assert decode_config(1, 8, 2, 2) is decode_config(32, 8, 4, 2) is FEW_HEADS
    assert decode_config(33, 8, 4, 2) is decode_config(40, 8, 4, 2) is SHORT_TILES  # 33 rows run in a step of 40


@pytest.mark.parametrize("programs", [1, 7, 66, 264])
@pytest.mark.parametrize(
    "seq_lens",
    [[1], [8192], [1024] * 5, [1024] * 66, [3000, 0, 0, 1, 2, 900, 0], [17] * 300, [0, 0]],
    ids=lambda lengths: f"{len(lengths)} rows of up to {max(lengths)}",
)
def test_a_plan_takes_each_tile_once_and_shares_alike(
    seq_lens: list[int], programs: int, device: torch.device
) -> None:
    tile = SMALL.tile
    plan = make_plan(torch.tensor(seq_lens, dtype=torch.int32, device=device), SMALL, programs)
    tiles = [-(-each // tile) for each in seq_lens]
    done = [0] * len(tiles)
    readers: list[list[int]] = [[] for _ in tiles]
    most = 0
    for program, (first, last, taken, left, length, *_) in enumerate(plan.of_programs.tolist()):
        assert last < 0 or (length, taken) == (seq_lens[first], done[first])
        mine = 0
        for row in range(first, last + 1):
            count = min(left - mine, tiles[row] - done[row])
            done[row] += count
            mine += count
            readers[row] += [program] * (count > 0)
        most = max(most, mine)
    assert done == tiles
    fair = max(2, -(-max(tiles) // 128), -(-sum(tiles) // programs))  # two tiles: `MIN_RUN`
    assert most <= fair + 4  # `NEXT_ROW`
    for (first, last, place, _), own in zip(plan.of_rows.tolist(), readers, strict=True):
        assert (last, place) == (own[-1] if own else -1, 0)
        assert not own or first == own[0]


def test_rows_of_one_length_are_split_alike(device: torch.device) -> None:
    plan = make_plan(torch.full((8,), 1000, dtype=torch.int32, device=device), SMALL, 66)
    assert [last - first for first, last, *_ in plan.of_rows.tolist()] == [7] * 8


def test_as_many_programs_as_fit_all_kv_heads() -> None:
    cpu = torch.device("cpu")  # counts as 4 multiprocessors
    assert [num_programs(heads, cpu, SHORT_TILES) for heads in (1, 4, 5, 100)] == [32, 8, 6, 1]


def test_a_workspace_that_is_too_small_is_refused(device: torch.device) -> None:
    workspace = DecodeWorkspace(1, 2, 1, 16, device, programs=2)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    q, pool = torch.randn(1, 2, 16, device=device), torch.randn(1, 1, 2, 1, 16, 16, device=device)
    with pytest.raises(ValueError, match="too small: 8 partial results of 12"):
        paged_decode(q, pool, 0, table, lengths, make_plan(lengths, SMALL, 3), workspace)


@pytest.mark.parametrize(("config", "programs"), [(SMALL, 3), (LISTS_BLOCKS, 2), (DecodeConfig(64, 4, 2, 2), 1)])
@pytest.mark.parametrize(("window", "has_sinks"), [(1, False), (33, False), (48, True), (0, True)])
def test_windows_and_sinks(
    window: int, has_sinks: bool, programs: int, config: DecodeConfig, device: torch.device
) -> None:
    """Blocks before a window are not read: their table entries are out of range."""
    seq_lens, num_heads, num_kv_heads = [1, 32, 33, 70, 200], 4, 2
    tables, table = block_tables_for(seq_lens, 32, device)
    pool = poisoned_pool(sum(map(len, tables)), 2, num_kv_heads, 32, 32, torch.float32, device)
    kvs = [fill_sequence(pool, LAYER, ids, seq_len) for ids, seq_len in zip(tables, seq_lens, strict=True)]
    give_back_blocks(pool, tables, table, [max(seq_len - window, 0) if window else 0 for seq_len in seq_lens])
    q = torch.randn(len(seq_lens), num_heads, 32, device=device)
    sinks = 2 * torch.randn(num_heads, device=device) if has_sinks else None
    workspace = DecodeWorkspace(len(seq_lens), num_heads, num_kv_heads, 32, device)
    workspace.outputs = torch.full((4096, 32), float("nan"), device=device)
    workspace.log_sums = torch.full((4096,), float("nan"), device=device)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    plan = make_plan(lengths, config, programs, window)
    out = paged_decode(q, pool, LAYER, table, lengths, plan, workspace, sinks)
    expected = [
        windowed_attention(q[row : row + 1].double(), kv[0].double(), kv[1].double(), window, sinks).flatten(1)
        for row, kv in enumerate(kvs)
    ]
    assert relative_error(out, torch.cat(expected)) < 1e-5


@pytest.mark.parametrize("kv_dtype", [HALF_DTYPE, torch.float8_e4m3fn])
def test_heads_of_256(kv_dtype: torch.dtype, device: torch.device) -> None:
    assert decode_config(40, 4, 2, 2, 256) is WIDE_HEADS
    run([70, 200], 4, 2, 64, HALF_DTYPE, device, None, 256, kv_dtype, config=None)


@pytest.mark.parametrize("window", [1, 33, 64])
def test_more_programs_than_a_window_has_tiles(window: int, device: torch.device) -> None:
    tables, table = block_tables_for([200], 16, device)
    pool = poisoned_pool(len(tables[0]), 2, 1, 16, 32, torch.float32, device)
    kv = fill_sequence(pool, LAYER, tables[0], 200)
    q, workspace = torch.randn(1, 2, 32, device=device), DecodeWorkspace(1, 2, 1, 32, device, programs=100)
    lengths = torch.tensor([200], dtype=torch.int32, device=device)
    plan = make_plan(lengths, SMALL, 100, window)
    out = paged_decode(q, pool, LAYER, table, lengths, plan, workspace)
    expected = windowed_attention(q.double(), kv[0].double(), kv[1].double(), window).flatten(1)
    assert relative_error(out, expected) < 1e-5


def test_a_padding_row_with_a_sink_gets_zeros(device: torch.device) -> None:
    pool, sinks = torch.randn(1, 1, 2, 1, 16, 16, device=device), torch.randn(2, device=device)
    lengths = torch.tensor([0, 1], dtype=torch.int32, device=device)
    table, workspace = torch.zeros(2, 1, dtype=torch.int32, device=device), DecodeWorkspace(2, 2, 1, 16, device)
    q = torch.randn(2, 2, 16, device=device)
    out = paged_decode(q, pool, 0, table, lengths, plan_decode(lengths, 2, pool, 8), workspace, sinks)
    assert not out[0].any()
    assert out[1].isfinite().all()
