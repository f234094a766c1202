"""The router's view of its workers: it recovers from a gap in KV events."""

from __future__ import annotations

import asyncio

import pytest

from common.token_ids import pack_ids
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.pool.index import IndexState
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from tests.harness.router import Cluster, cluster, text_of
from tests.harness.scripted_worker import BLOCK_SIZE, Script, ScriptedWorker

SLOW = Script(delay_seconds=0.02)
D0 = WorkerId("d0")
HIDDEN = list(range(48))  # a prompt whose blocks the worker stores without telling


def lose_events(worker: ScriptedWorker) -> None:
    """Make the worker store the blocks of HIDDEN while its events about them are lost."""
    worker.keys.update(block_keys(root_key("f" * 64), pack_ids(HIDDEN), BLOCK_SIZE))
    worker.sequence += 3


def knows_all(c: Cluster) -> bool:
    index = c.model.workers.index
    return index.state(D0) is IndexState.EXACT and index.num_worker_keys(D0) == len(c.decode[0].keys)


async def test_a_gap_in_kv_events_fetches_a_snapshot_and_open_requests_go_on() -> None:
    async with cluster() as c:
        control = text_of(await c.events(max_tokens=400))
    async with cluster(script=SLOW) as c:
        worker = c.decode[0]
        stream = asyncio.create_task(c.events(max_tokens=400))  # eight seconds, unless hurried
        await c.until(lambda: worker.num_tokens > 5)
        lose_events(worker)
        assert c.model.workers.cached_tokens(pack_ids(HIDDEN), pb.Submit()) == {}
        await c.chat("a prompt that is stored", max_tokens=1)  # the event after the gap
        await c.until(lambda: knows_all(c))
        assert not stream.done()
        assert worker.num_streams == 2
        assert c.model.workers.cached_tokens(pack_ids(HIDDEN), pb.Submit()) == {D0: len(HIDDEN)}
        await c.until(lambda: len(worker.sessions) == 1)  # the second stream was for the snapshot only
        worker.script.delay_seconds = 0.0
        assert text_of(await stream) == control
        assert len(worker.submits) == 2
        await c.chat("another prompt that is stored", max_tokens=1)
        await c.until(lambda: knows_all(c))
        assert worker.num_streams == 2  # no gap, no snapshot
        assert c.gateway.workers.links[0].num_lost == 0


async def test_a_refused_worker_that_is_gone_is_not_called_refused_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.worker_connection.REFUSED_BACKOFF_SECONDS", 0.05)
    async with cluster() as c:
        other = ScriptedWorker("decode", "other", Script(), model_fingerprint="e" * 64)
        await other.start()
        c.gateway.workers._add("decode", other.address)
        link = c.gateway.workers.links[-1]
        await c.until(lambda: link.state(0.0) == "refused")
        assert "model_fingerprint differs" in link.refused
        await other.kill()
        await c.until(lambda: link.state(0.0) == "connecting", timeout_seconds=20.0)


async def test_a_worker_with_another_cluster_token_is_called_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.workers.worker_connection.REFUSED_BACKOFF_SECONDS", 0.05)
    async with cluster() as c:
        other = ScriptedWorker("decode", "other", Script())
        await other.start(token="another")
        c.gateway.workers._add("decode", other.address)
        link = c.gateway.workers.links[-1]
        await c.until(lambda: link.state(0.0) == "refused")
        await asyncio.sleep(0.3)  # time for more attempts
        await other.kill()
    logged = [each.getMessage() for each in caplog.records if other.address in each.getMessage()]
    assert logged == [f"worker {other.address} refused: cluster token missing or wrong"]


async def test_a_snapshot_that_does_not_come_is_asked_for_again() -> None:
    async with cluster() as c:
        worker = c.decode[0]
        lose_events(worker)
        worker.script.refuse_streams = 1
        assert (await c.chat("a prompt that is stored")).status_code == 200
        await c.until(lambda: worker.num_streams == 2)
        index = c.model.workers.index
        assert index.state(D0) is IndexState.DEGRADED
        assert c.gateway.workers.links[0].state(0.0) == "ready"
        await c.until(lambda: c.gateway.workers.links[0]._feed._resync.done())  # type: ignore[union-attr]
        assert (await c.chat("another prompt that is stored")).status_code == 200
        await c.until(lambda: knows_all(c))


async def test_a_worker_that_dies_while_a_snapshot_is_fetched_leaves_nothing_in_the_index() -> None:
    async with cluster() as c:
        worker = c.decode[0]
        lose_events(worker)
        await c.chat("a prompt that is stored")
        await worker.kill()
        await c.until(lambda: not c.model.workers.usable("decode"))
        await c.until(lambda: c.model.workers.index.num_keys == 0)
        assert not c.model.workers.index._workers
