"""Blocks on their way through the staging area: the right bytes, no row and no block lost, also without room."""

from __future__ import annotations

import pytest
import torch

from engine.worker.exchange import DirectExchange, StagedExchange
from kvstore.block_pool import BlockPool

NUM_BLOCKS, NUM_ROWS = 6, 4


@pytest.fixture
def staged() -> tuple[StagedExchange, torch.Tensor, BlockPool]:
    kv_pool = torch.randn(NUM_BLOCKS, 2, 2, 1, 4, 8)
    block_bytes = kv_pool[0].numel() * 4
    staging = torch.zeros(NUM_ROWS, block_bytes, dtype=torch.uint8)
    pool = BlockPool(NUM_BLOCKS)
    return StagedExchange(staging.numpy(), staging, kv_pool, pool), kv_pool, pool


def test_a_block_travels_through_the_rows(staged: tuple[StagedExchange, torch.Tensor, BlockPool]) -> None:
    exchange, kv_pool, pool = staged
    blocks = pool.allocate(2)
    before = kv_pool[blocks].clone()
    rows = exchange.export(blocks)
    assert rows is not None
    assert pool.num_used == 0  # the pool's blocks are free at once
    kv_pool.zero_()
    target = pool.allocate(2)
    free_rows = exchange.open_load(target)
    assert free_rows is not None
    assert not set(free_rows) & set(rows)
    exchange.blocks[free_rows] = exchange.blocks[rows]  # what a pull does
    exchange.close_load(free_rows, target, ok=True)
    assert torch.equal(kv_pool[target], before)
    exchange.end_export(rows)
    assert exchange.open_load([*target, *pool.allocate(2)]) is not None  # every row is free again


def test_a_failed_load_changes_no_block(staged: tuple[StagedExchange, torch.Tensor, BlockPool]) -> None:
    exchange, kv_pool, pool = staged
    before = kv_pool.clone()
    target = pool.allocate(1)
    rows = exchange.open_load(target)
    assert rows is not None
    exchange.blocks[rows] = 255
    exchange.close_load(rows, target, ok=False)
    assert torch.equal(kv_pool, before)


def test_without_room_nothing_is_kept(staged: tuple[StagedExchange, torch.Tensor, BlockPool]) -> None:
    exchange, _, pool = staged
    blocks = pool.allocate(5)
    assert exchange.open_load(blocks) is None
    assert exchange.export(blocks) is None
    assert pool.num_used == 0
    pool.check_integrity()


def test_direct_exchange_leaves_blocks_where_they_are() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    exchange = DirectExchange(torch.zeros(3, 8, dtype=torch.uint8).numpy(), pool)
    assert exchange.export(blocks) == blocks
    assert pool.num_used == 2
    exchange.end_export(blocks)
    assert pool.num_used == 0
