"""The KvTransfer service of a worker: leases that readers renew and release."""

import asyncio
from dataclasses import replace
from pathlib import Path

from kvstore.transports.kv_transfer import LeaseClient
from kvstore.types import Epoch
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
