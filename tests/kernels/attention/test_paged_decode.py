from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.attention.simple_decode import simple_decode
from kernels.gpu.attention.decode_tiles import LISTED_BLOCKS
from kernels.gpu.attention.kv_splits import DecodeWorkspace, decode_config, num_splits
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.launching.launch_configs import DecodeConfig
from kernels.gpu.launching.tuning import FEW_HEADS, LONG_TILES, MANY_PROGRAMS, ONE_BYTE, SHORT_TILES, WIDE_HEADS
from kernels.paged_attention import attend_causally, attend_sequence
from tests.kernels.helpers import (
    BFLOAT16_BOUND,
    HALF_DTYPE,
    block_tables_for,
    fill_sequence,
    give_back_blocks,
    poisoned_pool,
    relative_error,
)

LAYER = 1
SMALL = DecodeConfig(16, 4, 2, 2)
LISTS_BLOCKS = DecodeConfig(16, 4, 2, 2, lists_blocks=True)


def run(
    seq_lens: list[int], num_heads: int, num_kv_heads: int, block_size: int, dtype: torch.dtype,
    device: torch.device, splits: int | None, head_dim: int = 32, kv_dtype: torch.dtype | None = None,
    config: DecodeConfig | None = SMALL,
) -> None:  # fmt: skip
    tables, table = block_tables_for(seq_lens, block_size, device)
    pool = poisoned_pool(sum(map(len, tables)), 2, num_kv_heads, block_size, head_dim, kv_dtype or dtype, device)
    kvs = [fill_sequence(pool, LAYER, ids, seq_len) for ids, seq_len in zip(tables, seq_lens, strict=True)]
    qkv = torch.randn(len(seq_lens), num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    q = qkv[:, :num_heads]
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace(len(seq_lens), num_heads, num_kv_heads, head_dim, device)
    workspace.outputs = torch.full((4096, head_dim), float("nan"), device=device)
    workspace.log_sums = torch.full((4096,), float("nan"), device=device)
    expected = torch.cat(
        [attend_sequence(q[row : row + 1].double(), kv.double()).flatten(1) for row, kv in enumerate(kvs)]
    )
    bound = 1e-5 if dtype == torch.float32 else BFLOAT16_BOUND
    out = paged_decode(q, pool, LAYER, table, lengths, workspace, config, splits)
    assert relative_error(out, expected) < bound
    assert relative_error(simple_decode(q, pool, LAYER, table, lengths), expected) < bound


@pytest.mark.parametrize("splits", [1, 3, 4, None])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(7, 1), (4, 2)])
def test_equals_the_reference(splits: int | None, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
    run([1, 16, 17, 70], num_heads, num_kv_heads, 16, HALF_DTYPE, device, splits)


@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
@pytest.mark.parametrize("splits", [1, 4])
def test_eight_bit_keys_and_values(dtype: torch.dtype, splits: int, device: torch.device) -> None:
    """Against the reference over the same stored numbers: what they were rounded from is not the kernel's error."""
    run([1, 17, 70], 7, 1, 16, dtype, device, splits, kv_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (16, 8, 128)])
def test_shapes_of_small_models(num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
    run([40, 130], num_heads, num_kv_heads, 64, HALF_DTYPE, device, None, head_dim)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_blocks_larger_and_smaller_than_a_tile(block_size: int, device: torch.device) -> None:
    run([75], 2, 1, block_size, torch.float32, device, 2)


@pytest.mark.parametrize(("block_size", "seq_len", "splits"), [(16, 16 * 64, 1), (16, 16 * 64 + 1, 1), (32, 4200, 2)])
def test_more_blocks_than_a_program_lists_at_a_time(
    block_size: int, seq_len: int, splits: int, device: torch.device
) -> None:
    """Also where a program's first tile lies inside a block: 4,200 keys are 263 tiles, 132 of them the first's."""
    assert seq_len // block_size // splits >= LISTED_BLOCKS.value
    run([seq_len, 40], 2, 1, block_size, torch.float32, device, splits, config=LISTS_BLOCKS)


def test_shares_that_begin_inside_a_block(device: torch.device) -> None:
    run([75, 16, 200], 2, 1, 64, torch.float32, device, 3, config=LISTS_BLOCKS)


def test_blocks_smaller_than_a_tile(device: torch.device) -> None:
    seq_lens = [1, 40, 64]
    tables, table = block_tables_for(seq_lens, 16, device)
    pool = poisoned_pool(sum(map(len, tables)), 1, 1, 16, 16, torch.float32, device)
    kvs = [fill_sequence(pool, 0, ids, seq_len) for ids, seq_len in zip(tables, seq_lens, strict=True)]
    q = torch.randn(3, 2, 16, device=device)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace(3, 2, 1, 16, device)
    out = paged_decode(q, pool, 0, table, lengths, workspace, DecodeConfig(32, 2, 3, 2), 1)
    for row, kv in enumerate(kvs):
        assert relative_error(out[row], attend_sequence(q[row : row + 1], kv).flatten()) < 1e-5


def test_padding_rows_get_zeros(device: torch.device) -> None:
    pool = torch.randn(1, 1, 2, 1, 16, 16, device=device)
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace(2, 2, 1, 16, device)
    lengths = torch.tensor([0, 1], dtype=torch.int32, device=device)
    out = paged_decode(torch.randn(2, 2, 16, device=device), pool, 0, table, lengths, workspace)
    assert not out[0].any()
    assert torch.allclose(out[1].view(2, 16), pool[0, 0, 1, 0, 0].expand(2, 16))


@pytest.mark.parametrize("config", [LONG_TILES, SHORT_TILES, MANY_PROGRAMS, FEW_HEADS, None])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (7, 1)])
def test_what_is_chosen_fits(
    config: DecodeConfig | None, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    run([1, 40, 75], num_heads, num_kv_heads, 16, HALF_DTYPE, device, None, config=config)


def test_settings_go_by_programs_and_group() -> None:
    assert decode_config(64, 8, 2, 2) is decode_config(128, 4, 7, 2) is SHORT_TILES
    assert decode_config(256, 8, 2, 2) is decode_config(256, 4, 7, 2) is MANY_PROGRAMS
    assert decode_config(1, 4, 7, 2) is decode_config(64, 4, 7, 2) is decode_config(34, 8, 4, 2) is LONG_TILES
    assert decode_config(1, 8, 2, 2) is decode_config(32, 8, 4, 2) is FEW_HEADS
    assert decode_config(33, 8, 4, 2) is decode_config(40, 8, 4, 2) is LONG_TILES  # 33 rows run in a step of 40


@pytest.mark.parametrize("config", [LONG_TILES, SHORT_TILES, ONE_BYTE])
def test_more_rows_never_get_more_splits(config: DecodeConfig) -> None:
    counts = [num_splits(rows, 4, torch.device("cpu"), config) for rows in range(1, 300)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1


def test_a_workspace_that_is_too_small_is_refused(device: torch.device) -> None:
    workspace = DecodeWorkspace(1, 2, 1, 16, device)
    table = torch.zeros(600, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="too small"):
        paged_decode(
            torch.randn(600, 2, 16, device=device), torch.randn(1, 1, 2, 1, 16, 16, device=device), 0, table,
            torch.ones(600, dtype=torch.int32, device=device), workspace, splits=2,
        )  # fmt: skip


@pytest.mark.parametrize(("config", "splits"), [(SMALL, 3), (LISTS_BLOCKS, 2), (DecodeConfig(64, 4, 2, 2), 1)])
@pytest.mark.parametrize(("window", "has_sinks"), [(1, False), (33, False), (48, True), (0, True)])
def test_windows_and_sinks(
    window: int, has_sinks: bool, splits: int, config: DecodeConfig, device: torch.device
) -> None:
    """Blocks in front of a window are not read: entries of tables point nowhere there."""
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
    out = paged_decode(q, pool, LAYER, table, lengths, workspace, config, splits, window, sinks)
    expected = [
        attend_causally(q[row : row + 1].double(), kv[0].double(), kv[1].double(), window, sinks).flatten(1)
        for row, kv in enumerate(kvs)
    ]
    assert relative_error(out, torch.cat(expected)) < 1e-5


@pytest.mark.parametrize("kv_dtype", [HALF_DTYPE, torch.float8_e4m3fn])
def test_heads_of_256(kv_dtype: torch.dtype, device: torch.device) -> None:
    assert decode_config(40, 4, 2, 2, 256) is WIDE_HEADS
    run([70, 200], 4, 2, 64, HALF_DTYPE, device, None, 256, kv_dtype, config=None)


@pytest.mark.parametrize("window", [1, 33, 64])
def test_a_window_has_no_more_programs_than_shares(
    window: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.gpu.attention.kv_splits.num_splits", lambda *_: 100)
    tables, table = block_tables_for([200], 16, device)
    pool = poisoned_pool(len(tables[0]), 2, 1, 16, 32, torch.float32, device)
    kv = fill_sequence(pool, LAYER, tables[0], 200)
    q, workspace = torch.randn(1, 2, 32, device=device), DecodeWorkspace(1, 2, 1, 32, device)
    workspace.outputs = torch.zeros(2 * (window // 32 + 2), 32, device=device)  # 100 programs would not fit
    lengths = torch.tensor([200], dtype=torch.int32, device=device)
    out = paged_decode(q, pool, LAYER, table, lengths, workspace, window=window)
    expected = attend_causally(q.double(), kv[0].double(), kv[1].double(), window).flatten(1)
    assert relative_error(out, expected) < 1e-5


def test_a_padding_row_with_a_sink_gets_zeros(device: torch.device) -> None:
    pool, sinks = torch.randn(1, 1, 2, 1, 16, 16, device=device), torch.randn(2, device=device)
    lengths = torch.tensor([0, 1], dtype=torch.int32, device=device)
    table, workspace = torch.zeros(2, 1, dtype=torch.int32, device=device), DecodeWorkspace(2, 2, 1, 16, device)
    q = torch.randn(2, 2, 16, device=device)
    out = paged_decode(q, pool, 0, table, lengths, workspace, window=8, sinks=sinks)
    assert not out[0].any()
    assert out[1].isfinite().all()
