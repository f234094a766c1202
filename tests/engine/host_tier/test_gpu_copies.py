"""Copies between a pool and host slots: every byte where it belongs, whatever the pieces are."""

from __future__ import annotations

import pytest
import torch

from engine.host_tier.gpu_copies import HostCopies
from kvstore.types import BlockId, HostSlot

NUM_BLOCKS, NUM_SLOTS = 12, 9
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def host_memory(block_bytes: int) -> torch.Tensor:
    return torch.zeros(NUM_SLOTS, block_bytes, dtype=torch.uint8)


def pairs(first: list[int], second: list[int]) -> list[tuple[int, int]]:
    return list(zip(first, second, strict=True))


@pytest.mark.parametrize("blocks_per_piece", [1, 2, 100])
def test_blocks_go_out_and_come_back(blocks_per_piece: int) -> None:
    pool = torch.randn(NUM_BLOCKS, 2, 2, 1, 4, 8, device=DEVICE)
    as_bytes = pool.view(NUM_BLOCKS, -1).view(torch.uint8)
    host = host_memory(as_bytes.shape[1])
    copies = HostCopies(pool, host, blocks_per_piece * as_bytes.shape[1])
    blocks, slots = [3, 4, 11, 0, 7], [2, 3, 4, 8, 0]
    before = as_bytes.cpu().clone()
    wait = copies.out([(BlockId(block), HostSlot(slot)) for block, slot in pairs(blocks, slots)])
    pool.zero_()  # the next step may write to these blocks at once
    wait()
    assert torch.equal(host[slots], before[blocks])
    assert not host[[1, 5, 6, 7]].any()
    targets = [5, 6, 1, 2, 9]
    copies.into([(HostSlot(slot), BlockId(block)) for slot, block in pairs(slots, targets)])()
    assert torch.equal(as_bytes[targets].cpu(), before[blocks])
    assert not as_bytes[[0, 3, 4, 7, 8, 10, 11]].any()


def test_a_slot_that_is_being_written_is_read_after() -> None:
    pool = torch.randn(NUM_BLOCKS, 64, 64, device=DEVICE)
    copies = HostCopies(pool, host_memory(64 * 64 * 4), 64 * 64 * 4)
    want = pool[:8].clone()
    for round_trip in range(20):
        copies.out([(BlockId(i), HostSlot(i)) for i in range(8)])
        pool[:8] = -1.0
        copies.into([(HostSlot(i), BlockId((i + round_trip) % 8)) for i in range(8)])
        pool[:8] = pool[[(i + round_trip) % 8 for i in range(8)]]
    assert torch.equal(pool[:8], want)


def test_nothing_to_copy_is_nothing_to_wait_for() -> None:
    copies = HostCopies(torch.randn(NUM_BLOCKS, 8, device=DEVICE), host_memory(32))
    copies.out([])()
    copies.into([])()
