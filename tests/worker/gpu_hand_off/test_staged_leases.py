"""Device blocks staged for readers and from owners: the right bytes, no row and no block lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import TransferError
from kvstore.handle.handle import HandleShard, HandleWriter, PeerShard, ShardAddress
from kvstore.layout import Shard
from kvstore.pool.block_pool import BlockPool
from kvstore.pool.digest import digest_blocks
from kvstore.pool.leases import Lease
from kvstore.transports.client import KvClient
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.shm import ShmReader
from kvstore.transports.transport import BlockPull, SourcePart
from kvstore.types import BlockId, Epoch, LeaseId, WorkerId
from tests.kvstore.helpers import GEOMETRY, ids, with_shard
from tests.kvstore.ranks import Ranks, geometry_of, running
from worker.gpu_hand_off.device_pool import DevicePool
from worker.gpu_hand_off.pinned_staging import HostRows, StagedReader
from worker.gpu_hand_off.rank_pool import DeviceRankPool
from worker.gpu_hand_off.shm_reader import DeviceShmReader
from worker.gpu_hand_off.staged_leases import StagedLeases

NUM_BLOCKS, NUM_ROWS, HEADS = 6, 4, 4
EPOCH = Epoch(1)
PARTS = [SourcePart(PeerShard(LeaseId("l"), WorkerId("w"), EPOCH, GEOMETRY, ShardAddress(), (), ()))]


class Parts:
    """A pool whose device is the CPU, and its staging."""

    def __init__(self) -> None:
        self.kv_pool = torch.randn(NUM_BLOCKS, 2, 2, 1, 4, 8)
        self.bytes = self.kv_pool.view(NUM_BLOCKS, -1).view(torch.uint8).numpy()
        self.staging = torch.zeros(NUM_ROWS, self.bytes.shape[1], dtype=torch.uint8)
        self.rows = HostRows(NUM_ROWS)
        self.pool = BlockPool(NUM_BLOCKS)
        self.device_pool = DevicePool(self.kv_pool)
        rank: Any = DeviceRankPool.__new__(DeviceRankPool)  # without the memory of one
        rank.device, rank.rows, rank.staging = self.device_pool, self.rows, self.staging
        handles = HandleWriter("w", [HandleShard(GEOMETRY, ShardAddress())], 60.0)
        self.leases = StagedLeases(EPOCH, [rank], self.pool.release, handles)

    def lease(self, num_blocks: int) -> Lease:
        return self.leases.grant(self.pool.allocate(num_blocks), [[]], 0, time.monotonic())[0]

    @property
    def num_free_rows(self) -> int:
        return self.rows._rows.num_available


@pytest.fixture
def parts() -> Parts:
    return Parts()


class RowsOfABlock:
    """A host transport whose peer's block at position p is all bytes p + 1."""

    def __init__(self, blocks: np.ndarray) -> None:  # type: ignore[type-arg]
        self._blocks = blocks
        self.pieces: list[int] = []
        self.fails_after = 99

    def pull(self, pull: BlockPull) -> list[list[int]]:
        if len(self.pieces) >= self.fails_after:
            raise TransferError("the peer is gone")
        self.pieces.append(len(pull.positions))
        for position, row in zip(pull.positions, pull.local_block_ids, strict=True):
            self._blocks[row] = position + 1
        return [list(pull.positions)]

    def close(self) -> None: ...


def block_pull(positions: list[int], local: list[BlockId], seconds: float = 60.0) -> BlockPull:
    return BlockPull(PARTS, positions, local, time.monotonic() + seconds)


def test_digests_are_those_of_the_host(parts: Parts) -> None:
    assert parts.leases.digests(ids(4, 0)) == [digest_blocks(parts.bytes[[4, 0]])]
    assert parts.leases.digests([]) == [[]]


def test_a_lease_keeps_its_blocks_and_is_staged_only_when_asked(parts: Parts) -> None:
    lease = parts.lease(2)
    blocks = list(lease.block_ids)
    assert (parts.pool.num_used, parts.num_free_rows) == (2, NUM_ROWS)
    rows = parts.leases.stage(lease.lease_id, 0)
    assert rows is not None
    assert parts.leases.stage(lease.lease_id, 0) == rows
    np.testing.assert_array_equal(parts.staging[rows], parts.bytes[blocks])
    assert parts.num_free_rows == NUM_ROWS - 2
    rows = parts.leases.stage(lease.lease_id, 1)
    assert rows is not None
    np.testing.assert_array_equal(parts.staging[rows], parts.bytes[blocks[1:]])
    assert parts.num_free_rows == NUM_ROWS - 3
    assert parts.leases.release(lease.lease_id, EPOCH)
    assert (parts.pool.num_used, parts.num_free_rows) == (0, NUM_ROWS)
    assert parts.leases.stage(lease.lease_id, 0) is None
    unstaged = parts.lease(1)
    assert parts.leases.release(unstaged.lease_id, EPOCH)
    assert parts.pool.num_used == 0


def test_without_room_nothing_is_staged_and_nothing_lost(parts: Parts) -> None:
    lease = parts.lease(5)
    assert parts.leases.stage(lease.lease_id, 0) is None
    assert parts.leases.stage(lease.lease_id, 5) is None  # there is no such block
    assert parts.leases.release(lease.lease_id, EPOCH)
    assert (parts.pool.num_used, parts.num_free_rows) == (0, NUM_ROWS)


def test_a_pull_through_rows_goes_in_pieces(parts: Parts) -> None:
    inner = RowsOfABlock(parts.staging.numpy())
    staged = StagedReader(inner, parts.rows, parts.staging, parts.device_pool)
    taken = parts.rows.take(2, 2)
    untouched = parts.bytes[2].copy()
    assert staged.pull(block_pull([0, 1, 2, 3, 4], ids(5, 4, 3, 1, 0))) == [[0, 1, 2, 3, 4]]
    assert inner.pieces == [2, 2, 1]
    assert [int(parts.bytes[block].max()) for block in (5, 4, 3, 1, 0)] == [1, 2, 3, 4, 5]
    assert [int(parts.bytes[block].min()) for block in (5, 4, 3, 1, 0)] == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(parts.bytes[2], untouched)
    parts.rows.give_back(taken)
    assert parts.num_free_rows == NUM_ROWS


def test_a_failed_pull_gives_its_rows_back(parts: Parts) -> None:
    inner = RowsOfABlock(parts.staging.numpy())
    inner.fails_after = 1
    with pytest.raises(TransferError, match="gone"):
        StagedReader(inner, parts.rows, parts.staging, parts.device_pool).pull(
            block_pull(list(range(5)), ids(0, 1, 2, 3, 4))
        )
    assert parts.num_free_rows == NUM_ROWS


def test_a_pull_waits_for_rows_until_its_deadline(parts: Parts) -> None:
    staged = StagedReader(RowsOfABlock(parts.staging.numpy()), parts.rows, parts.staging, parts.device_pool)
    taken = parts.rows.take(4, 4)
    with pytest.raises(TransferError, match="staging"):
        staged.pull(block_pull([0], ids(0), 0.02))
    threading.Timer(0.05, parts.rows.give_back, [taken]).start()
    assert staged.pull(block_pull([0], ids(0))) == [[0]]


# -- a peer's host memory without rows in between --------------------------------------------------------------------


class Reader:
    def __init__(self, worker: Ranks) -> None:
        geometry = geometry_of(HEADS, Shard())
        self.kv_pool = torch.zeros_like(worker.blocks)
        self.rows = torch.zeros(NUM_ROWS, geometry.block_bytes, dtype=torch.uint8)
        rows, leases, device_pool = HostRows(NUM_ROWS), LeaseClient(), DevicePool(self.kv_pool)
        staged = StagedReader(ShmReader(self.rows.numpy(), leases), rows, self.rows, device_pool)
        self.client = KvClient(geometry, {"shm": DeviceShmReader(device_pool, staged, leases)})


async def test_equal_shards_go_straight_to_their_blocks(tmp_path: Path) -> None:
    async with running(tmp_path, heads=HEADS, size=1) as worker:
        reader = Reader(worker)
        used = reader.client.pull(worker.lease([1, 0, 5, 4, 3], "shm"), [0, 2, 3, 4], ids(5, 4, 2, 0))
        assert used == "shm"
        assert torch.equal(reader.kv_pool[[5, 4, 2, 0]], worker.blocks[[1, 5, 4, 3]])
        assert not reader.kv_pool[[1, 3]].any()
        assert not reader.rows.any()
        reader.client.close()


@pytest.mark.wing("kvstore.handle.head_split")
async def test_other_shards_go_through_rows(tmp_path: Path) -> None:
    async with running(tmp_path, heads=HEADS, size=2) as worker:
        reader = Reader(worker)
        reader.client.pull(worker.lease([1, 0, 5, 4, 3], "shm"), [0, 1, 2, 3, 4], ids(0, 1, 2, 3, 4))
        assert torch.equal(reader.kv_pool[:5], worker.blocks[[1, 0, 5, 4, 3]])
        assert reader.rows.any()
        reader.client.close()


async def test_what_has_arrived_is_compared(tmp_path: Path) -> None:
    async with running(tmp_path, heads=HEADS, size=1) as worker:
        reader = Reader(worker)
        lease = worker.lease([1, 2], "shm")
        worker.blocks[2] += 1
        worker.owners[0].blocks[2] += 1  # overwritten since the lease was granted
        with pytest.raises(TransferError, match=r"block 1 .* intact"):
            reader.client.pull(lease, [0, 1], ids(0, 1))
        wrong = with_shard(worker.lease([1], "shm"), digests=(1,))
        with pytest.raises(TransferError, match=r"block 0 .* intact"):
            reader.client.pull(wrong, [0], ids(0))
        reader.client.close()
