"""Tuning tables: which rule is found, and which shapes are left to other kernels."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.gpu.few_rows import few_row_tuning as tuning
from kernels.gpu.few_rows.gemm_configs import GemmTable
from kernels.gpu.tuning import Rule, Table, above, at_most, between

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


def unreached(table: GemmTable[Any]) -> set[Any]:
    """Return settings that none of many shapes finds: their rules are dead, or in the wrong order."""
    found = {table.find(rows, n, k) for rows in (1, 8, 9, 16, 32, 64, 128, 256, 512, 4096) for n, k in SHAPES}
    return {rule.config for rule in table.rules} - found


@pytest.mark.parametrize("name", TABLES)
def test_every_rule_is_found_somewhere(name: str) -> None:
    """So the rules contain no impossible conditions."""
    assert not unreached(TABLES[name])


def test_what_gains_nothing_is_left_to_other_kernels() -> None:
    assert tuning.SKINNY.find(64, 4608, 3584) is None
    assert tuning.SKINNY_GATED.find(65, 18944, 3584) is tuning.SKINNY_GATED.find(8, 3072, 3584) is None
    assert tuning.PRELOADED.find(65, 4096, 1024) is tuning.PRELOADED.find(64, 12288, 2048) is None
    assert tuning.PRELOADED.find(1, 37888, 3584) is None
