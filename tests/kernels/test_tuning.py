"""Tables of settings: which rule is found, and what they leave to other kernels."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.gemm.split_k import SplitKWorkspace
from kernels.gpu.launching import tuning
from kernels.gpu.launching.launch_configs import GemmTable, Rule, Table, above, at_most, between

TABLES = {name: table for name, table in vars(tuning).items() if isinstance(table, GemmTable)}
SHAPES = [(n, k) for n in (96, 1024, 3584, 6144, 18944, 152064) for k in (64, 1024, 3584, 18944)]
SHAPES += [(3584, 9472), (8192, 4096), (28672, 8192)]  # of two ranks


def test_the_first_rule_that_fits_is_taken() -> None:
    table = Table(
        Rule("few", rows=at_most(8)), Rule("some", rows=between(8, 64), k=above(100)), Rule("any", k=above(50))
    )
    assert [table.find(rows=rows, k=101) for rows in (8, 9, 64, 65)] == ["few", "some", "some", "any"]
    assert [table.find(rows=9, k=k) for k in (50, 51, 100, 101)] == [None, "any", "any", "some"]


def test_derived_numbers_of_a_gemm() -> None:
    table = GemmTable(
        Rule("tall", n_per_k=above(2)), Rule("tiles", tiles=at_most(2)), Rule("outputs", outputs=at_most(8 * 512))
    )
    assert [table.find(8, n, 512) for n in (1025, 1024, 65, 129)] == ["tall", None, "tiles", "outputs"]


@pytest.mark.parametrize("name", TABLES)
def test_every_rule_is_found_somewhere(name: str) -> None:
    """And so names only numbers that exist. A rule that none of these reaches is dead or behind the wrong one."""
    found = [TABLES[name].find(rows, n, k) for rows in (1, 8, 9, 16, 32, 64, 128, 256, 512, 4096) for n, k in SHAPES]
    configs = {rule.config for rule in TABLES[name].rules}
    assert configs <= set(found)


def test_every_rule_of_packed_rows_is_found_somewhere() -> None:
    found = {
        tuning.PACKED_ROWS.find(rows=rows, n_per_k=n / k, k=k, bits=bits, pair=pair)
        for rows in (1, 2, 8, 9, 16, 32) for n, k in SHAPES for bits in range(2, 7) for pair in (32, 128)
    }  # fmt: skip
    assert {rule.config for rule in tuning.PACKED_ROWS.rules} | {None} == found


def test_every_rule_of_packed_streams_is_found_somewhere() -> None:
    found = {tuning.PACKED_STREAMS.find(rows=rows, n=n) for rows in (7, 64, 128) for n, _ in SHAPES}
    assert {rule.config for rule in tuning.PACKED_STREAMS.rules} == found


def test_what_gains_nothing_is_left_to_other_kernels() -> None:
    assert tuning.SKINNY.find(64, 4608, 3584) is None
    assert tuning.SKINNY_GATED.find(65, 18944, 3584) is tuning.SKINNY_GATED.find(8, 3072, 3584) is None
    assert tuning.PRELOADED.find(65, 4096, 1024) is tuning.PRELOADED.find(64, 12288, 2048) is None
    assert tuning.PRELOADED.find(1, 37888, 3584) is None
    assert tuning.SLICED_K.find(17, 4608, 3584) is tuning.SLICED_K_GATED.find(9, 18944, 3584) is None
    assert tuning.PACKED_TILES.find(129, 4608, 3584) is tuning.PACKED_TILES.find(257, 37888, 3584) is None


def test_splits_of_packed_weights_fit_their_workspace() -> None:
    workspace = SplitKWorkspace(torch.device("meta"))
    for rows in range(1, 257):
        for n, k in [*SHAPES, (16384, 53248), (32768, 32768), (65536, 40000)]:
            if config := tuning.PACKED_TILES.find(rows, n, k):
                block_m = max(16, min(config.block_m, 1 << (rows - 1).bit_length()))
                num_tiles = -(-n // config.block_n) * -(-rows // block_m)
                workspace.check(num_tiles, config.block_n * block_m, config.split_k)


def test_8_bit_weights_always_have_a_kernel() -> None:
    assert all(tuning.SKINNY_8_BIT.find(rows, n, k) for rows in (17, 64, 65, 512, 513, 8192) for n, k in SHAPES)
