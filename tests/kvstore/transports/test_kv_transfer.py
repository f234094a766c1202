"""The KvTransfer service of a worker: leases, and blocks that are brought to shared memory."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import TransferError
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.types import Epoch, LeaseId
from tests.kvstore.front import Worker

BLOCKS = [3, 4, 5, 1]


async def test_leases_are_renewed_and_released(tmp_path: Path) -> None:
    client = LeaseClient("secret")
    async with Worker(tmp_path) as worker:
        peer = worker.lease(BLOCKS)
        assert await asyncio.to_thread(client.renew, peer)
        assert not await asyncio.to_thread(client.renew, replace(peer, epoch=Epoch(1)))
        assert await asyncio.to_thread(client.release, peer)
        assert not await asyncio.to_thread(client.release, peer)
        assert not await asyncio.to_thread(client.renew, peer)
        assert worker.told == [("renew", "lease"), ("release", "lease")]
    client.close()


async def test_a_lease_that_was_released_is_not_staged(tmp_path: Path) -> None:
    leases = LeaseClient("secret")
    async with Worker(tmp_path) as worker:
        peer = worker.lease(BLOCKS)
        worker.leases.release(LeaseId("lease"), worker.leases.epoch)
        with pytest.raises(TransferError, match="released lease"):
            await asyncio.to_thread(leases.stage, peer.shards[0], 0, 60.0)
    leases.close()
