"""NIXL between agents of one process and of two, over the UCX transports of this machine."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from common.errors import ConfigError, HandshakeError, MiniInferError, TransferError, UnavailableError
from kvstore.handle.handle import PeerLease
from kvstore.layout import PoolGeometry, Shard
from kvstore.transports.client import KvClient
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.nixl import agent as nixl_agent
from kvstore.transports.nixl import reader as nixl_module
from kvstore.transports.nixl.agent import NixlAgent, NixlRead, agent_name
from kvstore.transports.nixl.reader import NixlReader
from kvstore.transports.transport import Blocks
from kvstore.types import Epoch
from tests.harness.forked import fork
from tests.harness.processes import until_stopped
from tests.kvstore import ranks as split
from tests.kvstore.helpers import (
    GEOMETRY,
    as_handle,
    empty_pool,
    handle_to_hex,
    ids,
    lease_from_hex,
    with_address,
    with_shard,
)
from tests.kvstore.transports.test_kv_transfer import BLOCKS, Worker

pytest.importorskip("nixl_cu13", reason="NIXL has packages for x86_64 alone")
BLOCK_BYTES = GEOMETRY.block_bytes


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Worker]:
    worker = Worker(folder)
    agent = NixlAgent(agent_name("w", worker.owner.epoch))
    agent.offer(worker.owner.blocks)
    worker.service.descriptions = {"nixl": agent.describe()}
    async with worker:
        yield worker


def lease_of(worker: Worker) -> PeerLease:
    return with_address(worker.lease(BLOCKS), nixl=agent_name("w", worker.owner.epoch))


@pytest.fixture(scope="module")
def agent() -> NixlAgent:
    return NixlAgent("reader/1")


def nixl_client(geometry: PoolGeometry, pool: Blocks, agent: NixlAgent, token: str = "") -> KvClient:
    leases = LeaseClient(token)
    return KvClient(geometry, {"nixl": NixlReader(pool, leases, agent)})


@contextmanager
def reading(agent: NixlAgent, token: str = "secret") -> Iterator[tuple[KvClient, np.ndarray]]:  # type: ignore[type-arg]
    mine = empty_pool()
    client = nixl_client(GEOMETRY, mine, agent, token)
    try:
        yield client, mine
    finally:
        client.close()


@pytest.mark.parametrize("piece_blocks", [1, 2, 100])
async def test_blocks_arrive_in_pieces(
    tmp_path: Path, agent: NixlAgent, monkeypatch: pytest.MonkeyPatch, piece_blocks: int
) -> None:
    monkeypatch.setattr(nixl_module, "PIECE_BYTES", piece_blocks * BLOCK_BYTES)
    async with running(tmp_path) as worker:
        with reading(agent) as (client, mine):
            used = await asyncio.to_thread(client.pull, lease_of(worker), [0, 1, 2, 3], ids(7, 2, 0, 1))
            assert used == "nixl"
            np.testing.assert_array_equal(mine[[7, 2, 0, 1]], worker.owner.blocks[BLOCKS])
            assert not mine[[3, 4, 5, 6]].any()
            await asyncio.to_thread(client.pull, lease_of(worker), [3], ids(4))  # the same peer once more
            np.testing.assert_array_equal(mine[4], worker.owner.blocks[1])
            await asyncio.to_thread(client.pull, lease_of(worker), [], [])


async def test_what_does_not_fit_is_refused(tmp_path: Path, agent: NixlAgent) -> None:
    async with running(tmp_path) as worker:
        peer = lease_of(worker)
        with reading(agent) as (client, _):
            for wrong, error, words in [
                (with_shard(peer, epoch=Epoch(1)), TransferError, "does not offer"),
                (with_address(peer, nixl="w/1"), TransferError, "another worker's"),
                (with_shard(peer, block_ids=tuple(ids(3, 4, 5, 99))), TransferError, "outside"),
                (with_shard(peer, digests=(1, 2, 3, 4)), TransferError, "intact"),
                (with_address(peer, nixl=None), UnavailableError, "no transport in common"),
            ]:
                with pytest.raises(error, match=words):
                    await asyncio.to_thread(client.pull, wrong, [0, 3], ids(0, 1))
            await asyncio.to_thread(client.pull, peer, [0, 3], ids(0, 1))
        with reading(agent, "wrong") as (client, _), pytest.raises(TransferError, match="token"):
            await asyncio.to_thread(client.pull, peer, [0], ids(0))


@pytest.mark.parametrize("has_own_client", [False, True], ids=["of one client", "of two ranks"])
async def test_a_pull_outlives_the_failure_of_another_from_the_same_peer(
    tmp_path: Path, agent: NixlAgent, monkeypatch: pytest.MonkeyPatch, has_own_client: bool
) -> None:
    async with running(tmp_path) as worker:
        peer = lease_of(worker)
        with reading(agent) as (client, mine), reading(agent) as (second, _):
            other = second if has_own_client else client
            pieces: list[object] = []
            read = agent.read

            def read_between_failures(*spans: Any) -> NixlRead:
                pieces.append(spans)
                if len(pieces) == 3:
                    with pytest.raises(TransferError, match="as asked"):
                        other.pull(peer, [3], ids(5))
                elif len(pieces) == 4:
                    raise TransferError("as asked")
                return read(*spans)

            monkeypatch.setattr(nixl_module, "PIECE_BYTES", BLOCK_BYTES)
            monkeypatch.setattr(agent, "read", read_between_failures)
            await asyncio.to_thread(client.pull, peer, [0, 1, 2, 3], ids(0, 1, 2, 3))
            assert len(pieces) == 5
            np.testing.assert_array_equal(mine[:4], worker.owner.blocks[BLOCKS])
    assert not agent._users


async def test_heads_are_split_anew(tmp_path: Path, agent: NixlAgent) -> None:
    async with split.running(tmp_path, heads=4, size=2) as worker:
        owner = NixlAgent(agent_name("w", worker.epoch))
        for one in worker.owners:
            owner.offer(one.blocks)
        worker.service.descriptions = {"nixl": owner.describe()}
        lease = worker.lease([4, 1, 2], "tcp")
        shards = [with_address(replace(lease, shards=(s,)), nixl=owner.name).shards[0] for s in lease.shards]
        mine = split.geometry_of(4, Shard())
        pool = empty_pool(mine)
        client = nixl_client(mine, pool, agent)
        await asyncio.to_thread(client.pull, replace(lease, shards=tuple(shards)), [0, 1, 2], ids(0, 5, 3))
        np.testing.assert_array_equal(pool[[0, 5, 3]], split.bytes_of(worker.blocks)[[4, 1, 2]])
        client.close()


def test_an_idle_agent_takes_no_core(agent: NixlAgent) -> None:
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25


def own_blocks(folder: Path, pipe: Connection) -> None:
    async def own() -> None:
        async with running(folder) as worker:
            pipe.send((handle_to_hex(as_handle(lease_of(worker))), worker.owner.blocks.tobytes()))
            await asyncio.sleep(600)

    asyncio.run(own())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_owner_that_is_gone_or_stopped_costs_a_bounded_time(
    tmp_path: Path, agent: NixlAgent, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A stopped one may still be read: within a host, transfers do not need it."""
    pipe, theirs = multiprocessing.Pipe()
    process = fork(own_blocks, tmp_path, theirs)
    theirs.close()
    with pipe, reading(agent) as (client, mine):
        try:
            assert process.pid is not None
            handle, stored = pipe.recv()
            peer, blocks = lease_from_hex(handle), np.frombuffer(stored, np.uint8).reshape(mine.shape)
            client.pull(peer, [0, 1], ids(0, 1))
            np.testing.assert_array_equal(mine[:2], blocks[BLOCKS[:2]])
            os.kill(process.pid, number)
            until_stopped(process.pid)
            monkeypatch.setattr(nixl_module, "TRANSFER_SECONDS", 0.3)
            began = time.monotonic()
            try:
                client.pull(peer, [2, 3], ids(2, 3), 1.0)
            except MiniInferError:  # of one that is stopped it may have come all the same, but too late
                assert number == signal.SIGSTOP or not mine[2:4].any()
            else:
                assert number == signal.SIGSTOP
                np.testing.assert_array_equal(mine[2:4], blocks[BLOCKS[2:]])
            assert time.monotonic() - began < 60.0
        finally:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    "description",
    [b"", b"\xc1", msgspec.msgpack.encode([b"x"]), msgspec.msgpack.encode([b"x", [[0, 1, 1]]]),
     msgspec.msgpack.encode(["x", []]), msgspec.msgpack.encode([b"x", [[1, 1]] * 300])],
)  # fmt: skip
def test_a_malformed_description_is_the_peers_error(agent: NixlAgent, description: bytes) -> None:
    with pytest.raises(HandshakeError):
        agent.connect(description)


def test_metadata_of_something_else_is_an_error(agent: NixlAgent) -> None:
    with pytest.raises(TransferError, match="cannot reach"):
        agent.connect(msgspec.msgpack.encode([b"no metadata", []]))


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("no_such_nixl",))
    with pytest.raises(ConfigError, match=r"pip install 'mini-infer\[nixl\]'"):
        NixlAgent("x")
