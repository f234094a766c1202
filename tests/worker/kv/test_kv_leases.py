"""Leases on an engine's blocks: the blocks for readers, and when they are free again."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from common.errors import TransferError
from kvstore.handle.handle import HandleShard, HandleWriter, PoolInfo, ShardAddress
from kvstore.pool.block_pool import BlockPool
from kvstore.pool.digest import digest_blocks
from kvstore.transports.transport import LocalPool
from kvstore.types import Epoch, LeaseId, WorkerId
from tests.kvstore.helpers import GEOMETRY
from worker.kv.kv_leases import KvLeases

EPOCH = Epoch(1)


def leases_of(rank: LocalPool, pool: BlockPool) -> KvLeases:
    handles = HandleWriter("w", [HandleShard(GEOMETRY, ShardAddress())], 60.0)
    return KvLeases(EPOCH, [rank], pool.release, handles)


def test_blocks_in_host_memory_stay_where_they_are(tmp_path: Path) -> None:
    pool = BlockPool(GEOMETRY.num_blocks)
    rank = LocalPool(PoolInfo(WorkerId("w"), EPOCH, GEOMETRY), str(tmp_path / "a.sock"))
    blocks = rank.host_blocks
    blocks[:] = np.random.default_rng(1).integers(0, 256, blocks.shape, dtype=np.uint8)
    leases = leases_of(rank, pool)
    lease, _ = leases.grant(pool.allocate(2), [[]], 0, time.monotonic())
    assert leases.digests(lease.block_ids) == [digest_blocks(blocks[list(lease.block_ids)])]
    assert leases.stage(lease.lease_id, 0) == list(lease.block_ids)
    assert leases.stage(lease.lease_id, 1) == list(lease.block_ids[1:])
    assert pool.num_used == 2
    assert leases.release(lease.lease_id, EPOCH)
    assert pool.num_used == 0
    rank.close()


def test_blocks_of_a_lease_that_is_being_sent_are_kept_after_its_end(tmp_path: Path) -> None:
    pool = BlockPool(GEOMETRY.num_blocks)
    rank = LocalPool(PoolInfo(WorkerId("w"), EPOCH, GEOMETRY), str(tmp_path / "a.sock"))
    leases = leases_of(rank, pool)
    lease, _ = leases.grant(pool.allocate(2), [[1, 2]], 8, time.monotonic())
    other, _ = leases.grant(pool.allocate(1), [[1]], 4, time.monotonic())
    for _ in range(2):
        assert leases.hold(lease.lease_id, EPOCH, [1]) == [lease.block_ids[1]]
    assert leases.release(lease.lease_id, EPOCH)
    leases.hold(other.lease_id, EPOCH, [0])
    assert leases.expire(time.monotonic() + 100) == [other.lease_id]
    leases.let_go(lease.lease_id)
    assert leases.expire(time.monotonic()) == []
    assert (len(leases), pool.num_used) == (2, 3)
    leases.let_go(lease.lease_id)
    assert leases.expire(time.monotonic()) == []
    assert (len(leases), pool.num_used) == (1, 1)
    leases.let_go(other.lease_id)
    assert leases.expire(time.monotonic()) == []
    assert (len(leases), pool.num_used) == (0, 0)
    for lease_id, positions in ((lease.lease_id, [0]), (LeaseId("guess"), [0])):
        with pytest.raises(TransferError, match="unknown or released"):
            leases.hold(lease_id, EPOCH, positions)
    rank.close()
