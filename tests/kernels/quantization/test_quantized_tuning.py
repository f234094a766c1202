"""Tuning tables of quantized GEMMs: which rule is found, and which shapes are left to other kernels."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.few_rows.gemm_configs import GemmTable
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.quantization import quantized_tuning as tuning
from tests.kernels.few_rows.test_tuning import SHAPES, unreached

TABLES = {name: table for name, table in vars(tuning).items() if isinstance(table, GemmTable)}


@pytest.mark.parametrize("name", TABLES)
def test_every_rule_is_found_somewhere(name: str) -> None:
    assert not unreached(TABLES[name])


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
