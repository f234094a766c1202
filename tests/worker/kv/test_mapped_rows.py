"""Blocks of a peer's host memory into a 'device' that is the CPU, without rows in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import TransferError
from kvstore.layout import Shard
from kvstore.transports.client import KvClient
from kvstore.transports.lease_client import LeaseClient
from kvstore.transports.shm.reader import DeviceShmReader, ShmReader
from kvstore.types import BlockId
from tests.kvstore.helpers import with_shard
from tests.kvstore.ranks import Ranks, geometry_of, running
from worker.kv.device_pool import DevicePool
from worker.kv.pinned_staging import HostRows, StagedReader

NUM_ROWS, HEADS = 4, 4


class Reader:
    def __init__(self, worker: Ranks) -> None:
        geometry = geometry_of(HEADS, Shard())
        self.kv_pool = torch.zeros_like(worker.blocks)
        self.rows = torch.zeros(NUM_ROWS, geometry.block_bytes, dtype=torch.uint8)
        rows, leases, device_pool = HostRows(self.rows.numpy(), self.rows), LeaseClient(), DevicePool(self.kv_pool)
        staged = StagedReader(ShmReader(rows.blocks, leases), rows, device_pool)
        self.client = KvClient(geometry, {"shm": DeviceShmReader(device_pool, staged, leases)}, leases)


def ids(*numbers: int) -> list[BlockId]:
    return list(map(BlockId, numbers))


async def test_equal_shards_go_straight_to_their_blocks(tmp_path: Path) -> None:
    async with running(tmp_path, heads=HEADS, size=1) as worker:
        reader = Reader(worker)
        result = reader.client.pull(worker.lease([1, 0, 5, 4, 3], "shm"), [0, 2, 3, 4], ids(5, 4, 2, 0))
        assert result.transport == "shm"
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
