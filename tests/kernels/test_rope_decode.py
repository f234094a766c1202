"""The kernel that rotates within decode attention against the two kernels that it stands for: the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from kernels.gpu.kv_splits import DecodeWorkspace
from kernels.gpu.launch_configs import DecodeConfig
from kernels.gpu.paged_decode import paged_decode
from kernels.gpu.rope import rope_and_write_kv
from kernels.gpu.rope_decode import rope_and_decode
from tests.kernels.helpers import (
    HALF_DTYPE,
    block_tables_for,
    fill_sequence,
    give_back_blocks,
    poisoned_pool,
    relative_error,
)
from tests.kernels.test_rope import HEAD_DIM, rotary_table

LAYER, EPS = 1, 1e-6
SMALL = DecodeConfig(16, 4, 2, 2)
LISTS_BLOCKS = DecodeConfig(16, 4, 2, 2, lists_blocks=True)
SEQ_LENS = [1, 16, 17, 33, 48]  # the new token included
E4M3 = torch.float8_e4m3fn


@dataclass
class Case:
    """Rows whose new tokens have no K and V yet; memory behind their sequences is NaN."""

    qkv: Tensor
    angles: Tensor
    norm: Tensor | None
    pool: Tensor
    tables: Tensor
    lengths: Tensor
    slots: Tensor
    sinks: Tensor | None = None
    window: int = 0

    def workspace(self) -> DecodeWorkspace:
        num_kv_heads, _, head_dim = self.pool.shape[3:]
        made = DecodeWorkspace(
            len(self.lengths), self.qkv.shape[-2] - 2 * num_kv_heads, num_kv_heads, head_dim, self.pool.device
        )
        made.outputs = torch.full((4096, head_dim), float("nan"), device=self.pool.device)
        made.log_sums = torch.full((4096,), float("nan"), device=self.pool.device)
        return made

    def fused(self, config: DecodeConfig | None, splits: int | None) -> tuple[Tensor, Tensor]:
        """Output and pool."""
        pool = self.pool.clone()
        out = rope_and_decode(
            self.qkv.clone(), self.angles, self.slots, self.norm, EPS, pool, LAYER, self.tables, self.lengths,
            self.workspace(), config, splits, self.window, self.sinks,
        )  # fmt: skip
        return out, pool

    def apart(self, config: DecodeConfig | None, splits: int | None) -> tuple[Tensor, Tensor]:
        pool, qkv = self.pool.clone(), self.qkv.clone()
        positions = (self.lengths - 1).clamp(min=0)
        rope_and_write_kv(qkv, self.angles, positions, self.slots, self.norm, EPS, pool, LAYER)
        rotated = qkv[0] if qkv.dim() == 4 else qkv
        q = rotated[:, : rotated.shape[1] - 2 * pool.shape[3]]
        out = paged_decode(
            q, pool, LAYER, self.tables, self.lengths, self.workspace(), config, splits, self.window, self.sinks
        )  # fmt: skip
        return out, pool


def make_case(
    device: torch.device, num_heads: int = 4, num_kv_heads: int = 2, dtype: torch.dtype = HALF_DTYPE,
    kv_dtype: torch.dtype | None = None, has_norm: bool = True, block_size: int = 16, num_partials: int = 0,
    window: int = 0, has_sinks: bool = False, seq_lens: list[int] = SEQ_LENS,
) -> Case:  # fmt: skip
    ids, tables = block_tables_for(seq_lens, block_size, device)
    pool = poisoned_pool(sum(map(len, ids)), 2, num_kv_heads, block_size, HEAD_DIM, kv_dtype or dtype, device)
    for own, seq_len in zip(ids, seq_lens, strict=True):
        fill_sequence(pool, LAYER, own, seq_len - 1)
    give_back_blocks(pool, ids, tables, [max(seq_len - window, 0) if window else 0 for seq_len in seq_lens])
    last = [seq_len - 1 for seq_len in seq_lens]
    slots = [own[at // block_size] * block_size + at % block_size for own, at in zip(ids, last, strict=True)]
    num_all, parts = num_heads + 2 * num_kv_heads, (num_partials,) if num_partials else ()
    return Case(
        torch.randn(*parts, len(seq_lens), num_all, HEAD_DIM, device=device).to(dtype),
        rotary_table(dtype, device, max(seq_lens)),
        torch.randn(num_heads + num_kv_heads, HEAD_DIM, device=device).to(dtype) if has_norm else None,
        pool,
        tables,
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        2 * torch.randn(num_heads, device=device) if has_sinks else None,
        window,
    )


def check(case: Case, config: DecodeConfig | None = SMALL, splits: int | None = 3) -> None:
    """Bits equal, but where a compiled kernel adds up the squares of a QK norm in another order."""
    (out, pool), (expected, expected_pool) = case.fused(config, splits), case.apart(config, splits)
    assert not expected.isnan().any()
    if case.norm is None or not torch.cuda.is_available():
        assert torch.equal(out, expected)
        assert torch.equal(bits(pool), bits(expected_pool))
    else:
        assert relative_error(out, expected) < 1e-2
        stored, expected_stored = pool.float(), expected_pool.float()
        written = ~expected_stored.isnan()
        assert torch.equal(written, ~stored.isnan())
        assert relative_error(stored[written], expected_stored[written]) < 1e-2
    changed = (bits(pool) != bits(case.pool)).flatten(3).any(-1)
    assert changed[:, LAYER].any()
    assert not changed[:, 1 - LAYER].any()


def bits(pool: Tensor) -> Tensor:
    return pool.view(torch.uint8)


@pytest.mark.parametrize("splits", [1, 3, None])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(7, 1), (4, 2), (3, 3), (16, 1), (20, 1)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_same_bits_as_two_kernels(
    has_norm: bool, num_heads: int, num_kv_heads: int, splits: int | None, device: torch.device
) -> None:
    check(make_case(device, num_heads, num_kv_heads, has_norm=has_norm), splits=splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, HALF_DTYPE])
def test_keys_and_values_of_eight_bits(dtype: torch.dtype, splits: int, device: torch.device) -> None:
    """Of bfloat16, queries are rounded to that before they become the float16 that attention computes in."""
    check(make_case(device, dtype=dtype, kv_dtype=E4M3, has_norm=False), splits=splits)
    check(make_case(device, dtype=dtype, kv_dtype=E4M3, seq_lens=[31, 1]), splits=splits)


@pytest.mark.parametrize("num_partials", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_partials_are_added_up(dtype: torch.dtype, num_partials: int, device: torch.device) -> None:
    check(make_case(device, dtype=dtype, num_partials=num_partials, has_norm=False))
    check(make_case(device, dtype=dtype, num_partials=num_partials))


@pytest.mark.parametrize(("config", "splits"), [(SMALL, 3), (LISTS_BLOCKS, 2), (DecodeConfig(64, 4, 2, 2), 1)])
@pytest.mark.parametrize(("window", "has_sinks"), [(1, False), (33, False), (48, True), (0, True)])
def test_windows_and_sinks(
    window: int, has_sinks: bool, splits: int, config: DecodeConfig, device: torch.device
) -> None:
    seq_lens = [1, 32, 33, 70, 200]
    check(
        make_case(device, block_size=32, window=window, has_sinks=has_sinks, has_norm=False, seq_lens=seq_lens),
        config, splits,
    )  # fmt: skip


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(7, 1), (4, 2)])
def test_settings_by_rule(
    num_heads: int, num_kv_heads: int, kv_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Blocks larger than a tile and smaller ones; the new token is the first or the last of one, or in between."""
    for block_size in (16, 64):
        seq_lens = [64, 65, 128, 129, 200, 1040]
        case = make_case(
            device, num_heads, num_kv_heads, kv_dtype=kv_dtype, block_size=block_size, has_norm=False,
            seq_lens=seq_lens,
        )  # fmt: skip
        check(case, None, None)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_padding_rows_get_zeros_and_store_nothing(has_sinks: bool, device: torch.device) -> None:
    case = make_case(device, has_sinks=has_sinks, has_norm=False, window=8, seq_lens=[20, 16, 7])
    case.lengths[1], case.slots[1] = 0, -1
    check(case)
    out, pool = case.fused(SMALL, 3)
    assert not out[1].any()
    assert int((bits(pool) != bits(case.pool)).any(-1).sum()) == 2 * 2 * 2  # rows, planes, heads


def test_without_slots_nothing_is_stored(device: torch.device) -> None:
    """As while a graph is captured."""
    case = make_case(device)
    case.slots.fill_(-1)
    case.pool.fill_(0.5)
    _, pool = case.fused(SMALL, 3)
    assert torch.equal(bits(pool), bits(case.pool))


def test_what_is_refused(device: torch.device) -> None:
    case = make_case(device)
    with pytest.raises(ValueError, match="too small"):
        case.fused(SMALL, 4096)
    case.qkv = case.qkv.mT.contiguous().mT
    with pytest.raises(ValueError, match="contiguous"):
        rope_and_decode(
            case.qkv, case.angles, case.slots, None, EPS, case.pool, LAYER, case.tables, case.lengths,
            case.workspace(),
        )  # fmt: skip
    case.qkv = torch.zeros(5, 8, 2 * HEAD_DIM, device=device)
    with pytest.raises(ValueError, match="head_dim"):
        case.fused(SMALL, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has an order of its own")
@pytest.mark.parametrize("splits", [1, 3])
def test_no_program_waits_for_another(splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other: the last first gives the same."""
    case = make_case(device, seq_lens=[17, 200])
    expected = case.fused(SMALL, splits)
    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx

    def set_mirrored(*index: int) -> None:
        set_index(*(size - 1 - at for size, at in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", set_mirrored)
    for mirrored, plain in zip(case.fused(SMALL, splits), expected, strict=True):
        assert torch.equal(bits(mirrored), bits(plain))
