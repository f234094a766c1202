from __future__ import annotations

import pytest
import torch

from kernels.gpu.prefill_backends.gather_kv import gather_kv, gather_tiles
from kernels.paged_attention import gather_kv as gather_reference
from tests.kernels.helpers import block_tables_for, fill_sequence, poisoned_pool


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference_and_stops_at_the_end(block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    seq_lens = [21, 1, 50]
    tables, table = block_tables_for(seq_lens, block_size, device)
    pool = poisoned_pool(sum(map(len, tables)), 2, 2, block_size, 16, dtype, device)
    for ids, seq_len in zip(tables, seq_lens, strict=True):
        fill_sequence(pool, 1, ids, seq_len)
    out = torch.full((2, 2, 80, 16), 7.0, dtype=dtype, device=device)
    tiles = torch.tensor(gather_tiles(seq_lens, 16), dtype=torch.int32, device=device)
    assert gather_kv(pool, 1, table, tiles, out, 16) is out
    first = 0
    for ids, seq_len in zip(tables, seq_lens, strict=True):
        expected = gather_reference(pool, 1, torch.tensor(ids, device=device), seq_len)
        assert torch.equal(out[:, :, first : first + seq_len], expected)
        first += seq_len
    assert bool((out[:, :, first:] == 7.0).all())


def test_nothing_to_copy(device: torch.device) -> None:
    pool = torch.zeros(1, 1, 2, 1, 8, 16, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    out = torch.full((2, 1, 4, 16), 7.0, device=device)
    gather_kv(pool, 0, table, torch.empty(0, 4, dtype=torch.int32, device=device), out)
    assert bool((out == 7.0).all())


def test_tiles_cover_each_token_once_in_order() -> None:
    tiles = gather_tiles([5, 0, 9], 4)
    assert tiles == [(0, 0, 0, 4), (0, 4, 4, 1), (2, 0, 5, 4), (2, 4, 9, 4), (2, 8, 13, 1)]
