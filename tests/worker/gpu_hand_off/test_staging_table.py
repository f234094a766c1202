"""Staging of GPU blocks in shared memory for a reader, on the front's side."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from common.errors import TransferError
from kvstore.transports.client import KvClient
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.staged_rows import stage
from kvstore.types import LeaseId
from tests.kvstore.front import Worker
from tests.kvstore.helpers import ids, with_address, with_shard
from worker.gpu_hand_off.staging_table import StagingTable
from worker.messages import StepReport


async def test_a_lease_that_was_released_is_not_staged(tmp_path: Path) -> None:
    leases = LeaseClient("secret")
    async with Worker(tmp_path) as worker:
        peer = worker.lease([3, 4])
        worker.leases.release(LeaseId("lease"), worker.leases.epoch)
        with pytest.raises(TransferError, match="released lease"):
            await asyncio.to_thread(stage, leases, peer.shards[0], 0, 60.0)
    leases.close()


async def test_blocks_in_gpu_memory_are_read_from_the_rows_that_they_were_copied_to(
    tmp_path: Path, client: KvClient, mine: np.ndarray  # type: ignore[type-arg]
) -> None:  # fmt: skip
    def ask(lease_id: LeaseId, first: int) -> None:  # blocks 100 to 102 lie elsewhere; rows 6, 2, 3 get their bytes
        asyncio.get_running_loop().call_later(0.01, table.answer, lease_id, first, [6, 2, 3][first:])

    table = StagingTable(ask)
    async with Worker(tmp_path, stage=table.rows) as worker:
        worker.adopt([100, 101, 102])
        rows = worker.owner.peer([6, 2, 3], "lease", worker.server.address)
        peer = with_address(with_shard(rows, block_ids=tuple(ids(100, 101, 102))), needs_staging=True)
        assert (await asyncio.to_thread(client.pull, peer, [2, 1], ids(4, 5))) == "shm"
        np.testing.assert_array_equal(mine[[4, 5]], worker.owner.blocks[[3, 2]])


async def test_without_room_to_stage_a_pull_fails_and_a_later_one_may_work(tmp_path: Path, client: KvClient) -> None:
    answers: list[list[int] | None] = [None, [1]]

    def ask(lease_id: LeaseId, first: int) -> None:
        asyncio.get_running_loop().call_soon(table.answer, lease_id, first, answers.pop(0))

    table = StagingTable(ask)
    async with Worker(tmp_path, stage=table.rows) as worker:
        worker.adopt([100])
        peer = with_address(worker.owner.peer([1], "lease", worker.server.address), tcp=None, needs_staging=True)
        with pytest.raises(TransferError, match="no room"):
            await asyncio.to_thread(client.pull, peer, [0], ids(0))
        await asyncio.to_thread(client.pull, peer, [0], ids(0))
        table.end(LeaseId("lease"))
        table.end(LeaseId("lease"))
        assert not answers


async def test_a_lease_that_ends_while_it_is_staged_is_an_error() -> None:
    table = StagingTable(lambda *part: None)
    waiting = asyncio.create_task(table.rows(LeaseId("x"), 0))
    await asyncio.sleep(0)
    table.end(LeaseId("x"))
    table.answer(LeaseId("x"), 0, [1])  # too late
    with pytest.raises(TransferError, match="ended"):
        await waiting


async def test_reports_of_the_engine_process_bring_rows_and_ends_of_leases() -> None:
    table = StagingTable(lambda *part: None)
    waiting = [asyncio.create_task(table.rows(LeaseId(name), 0)) for name in ("x", "y")]
    await asyncio.sleep(0)
    table.apply(StepReport(staged=[(LeaseId("x"), 0, ids(7))], ended_leases=[LeaseId("x"), LeaseId("y")]))
    assert await waiting[0] == [7]
    with pytest.raises(TransferError, match="ended"):
        await waiting[1]
