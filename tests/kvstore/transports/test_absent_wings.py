"""Errors of a reader that lacks the wing for pools of several ranks, in the copy of tests/wings.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.errors import HandshakeError
from common.wings import has_wing
from kvstore.layout import Shard
from kvstore.types import BlockId
from tests.kvstore.helpers import empty_pool, host_client
from tests.kvstore.ranks import geometry_of, running

pytestmark = pytest.mark.skipif(has_wing("kvstore.handle.head_split"), reason="this installation has its wings")


async def test_kv_of_several_ranks_is_refused(tmp_path: Path) -> None:
    geometry = geometry_of(4, Shard())
    async with running(tmp_path, heads=4, size=2) as worker:
        client = host_client(geometry, empty_pool(geometry))
        with pytest.raises(HandshakeError, match=r"worker w has 2 ranks: .* needs kvstore\.handle\.head_split"):
            await asyncio.to_thread(client.pull, worker.lease([0], "shm"), [0], [BlockId(0)])
        client.close()
