"""The nccl transport between two pools, with a stand-in for NCCL: bytes, refusals, and peers that hang nobody."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import connection as pipes
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.errors import MiniInferError, TransferError
from kvstore.handle.handle import PeerLease, PeerShard, ShardAddress
from kvstore.layout import PoolGeometry, Shard, full_attention
from kvstore.pool.digest import digest_blocks
from kvstore.pool.leases import LeaseTable
from kvstore.transports.fallbacks import client
from kvstore.transports.fallbacks.client import FallbackClient
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.nccl import connection as nccl_connection
from kvstore.transports.nccl import library as nccl_library
from kvstore.transports.nccl import reader as nccl
from kvstore.transports.nccl import server as nccl_server
from kvstore.transports.nccl.connection import Connection
from kvstore.transports.nccl.reader import NcclReader
from kvstore.transports.nccl.server import NcclServer
from kvstore.transports.shm import ShmReader
from kvstore.types import BlockId, Epoch, LeaseId, WorkerId
from tests.harness.forked import fork
from tests.harness.waiting import wait_until
from tests.kvstore.helpers import (
    GEOMETRY,
    Owner,
    as_handle,
    empty_pool,
    handle_to_hex,
    ids,
    lease_from_hex,
    pull_of_one,
    with_address,
    with_shard,
)
from tests.worker.nccl.fake_nccl import FakeLink, FakeNccl
from worker.gpu_hand_off.device_pool import DevicePool
from worker.nccl import pool as nccl_pool
from worker.nccl.pool import NcclPool


class Leases:
    """Counts holds."""

    def __init__(self, table: LeaseTable) -> None:
        self.table = table
        self.held: list[LeaseId] = []

    def hold(self, lease_id: LeaseId, epoch: Epoch, positions: Sequence[int]) -> list[BlockId]:
        block_ids = self.table.resolve(lease_id, epoch, positions, time.monotonic())
        self.held.append(lease_id)
        return block_ids

    def let_go(self, lease_id: LeaseId) -> None:
        self.held.remove(lease_id)


class NcclOwner(Owner):
    """A pool that is offered by NCCL and by shared memory. `stall`: extra seconds of each send."""

    def __init__(self, folder: Path, name: str = "owner", seed: int = 0, token: str = "") -> None:
        super().__init__(folder, name=name, seed=seed)
        self.fake = FakeNccl("GPU-owner")
        self.pool = NcclPool(DevicePool(torch.from_numpy(self.blocks)), self.fake)
        self.stall = 0.0
        self.on_stall: Callable[[], None] = lambda: None
        self.holder = Leases(self.leases)
        self.nccl = NcclServer("127.0.0.1", token, name, self.epoch)
        self.nccl.add(self, GEOMETRY.block_bytes)  # type: ignore[arg-type]
        self.nccl.serve(self.holder)  # type: ignore[list-item]

    def __getattr__(self, name: str) -> object:  # stands for its pool
        return getattr(self.pool, name)

    def send(self, *arguments: object) -> None:
        if self.stall:
            self.on_stall()
            time.sleep(self.stall)
        self.pool.send(*arguments)  # type: ignore[arg-type]

    def lease(self, block_ids: Sequence[int], shm: bool = False, seconds: float = 60.0) -> PeerLease:
        lease = self.leases.grant(ids(*block_ids), time.monotonic(), seconds)
        address = f"{self.nccl.port} {self.fake.gpu}"
        return with_address(self.peer(block_ids, lease.lease_id, shm=shm), "127.0.0.1:1", nccl=address)

    @property
    def link(self) -> FakeLink:
        return self.fake.links[-1]

    def close(self) -> None:
        self.nccl.close()
        super().close()


class Reader:
    def __init__(self, gpu: str = "GPU-reader", token: str = "") -> None:
        self.blocks = empty_pool()
        self.fake = FakeNccl(gpu)
        self.pool = NcclPool(DevicePool(torch.from_numpy(self.blocks)), self.fake)
        self.transport = NcclReader(self.pool, token)
        leases = LeaseClient()
        self.client = FallbackClient(GEOMETRY, {"nccl": self.transport, "shm": ShmReader(self.blocks, leases)})

    def pull(self, lease: PeerLease, positions: list[int], local: list[BlockId], seconds: float = 100.0) -> str:
        return self.client.pull(lease, positions, local, seconds)


def num_links(reader: Reader) -> int:
    return sum(pair.link is not None for pair in reader.transport._pairs.values())


def has_ended(connection: Connection | None) -> bool:
    try:
        assert connection is not None
        connection.check()
    except TransferError:
        return True
    return False


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[NcclOwner]:
    owner = NcclOwner(tmp_path)
    yield owner
    owner.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.client.close()
    assert all(link.num_aborts for link in reader.fake.links)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise deadlines, so that waiting for a core ends no transfer."""
    monkeypatch.setattr(nccl, "TRANSFER_SECONDS", 100.0)
    monkeypatch.setattr(nccl_connection, "REPLY_SECONDS", 100.0)
    monkeypatch.setattr(client, "FALLBACK_SECONDS", 100.0)
    for module in (nccl, nccl_server):
        monkeypatch.setattr(module, "REPLY_SECONDS", 100.0)
        monkeypatch.setattr(module, "JOIN_SECONDS", 100.0)


@contextmanager
def little_patience(reply_seconds: float = 100.0) -> Iterator[None]:
    """Set short deadlines for transfers, and optionally for replies, that never come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "TRANSFER_SECONDS", 0.5)
        patch.setattr(nccl_connection, "REPLY_SECONDS", reply_seconds)
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the clock for deadlines of transfers under way; `later`: by how much it is fast."""
    made = SimpleNamespace(later=0.0, sleep=time.sleep)
    made.monotonic = lambda: time.monotonic() + made.later
    monkeypatch.setattr(nccl_library, "time", made)
    return made


@pytest.mark.parametrize("piece_blocks", [1, 2, 3, 100])
def test_blocks_arrive_in_pieces_by_one_communicator(
    owner: NcclOwner, reader: Reader, piece_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_pool, "PIECE_BYTES", piece_blocks * GEOMETRY.block_bytes + 5)
    for block_ids, positions in (([3, 4, 7, 0, 1, 2], [0, 1, 2, 4, 5]), ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4])):
        reader.blocks[:] = 0
        assert reader.pull(owner.lease(block_ids), positions, ids(5, 1, 0, 7, 3)) == "nccl"
        wanted = [block_ids[position] for position in positions]
        np.testing.assert_array_equal(reader.blocks[[5, 1, 0, 7, 3]], owner.blocks[wanted])
        assert not reader.blocks[[2, 4, 6]].any()
        wait_until(lambda: not owner.holder.held)
    assert len(reader.fake.links) == len(owner.fake.links) == num_links(reader) == 1
    assert owner.link.messages == reader.fake.links[0].messages
    assert len(owner.link.messages) == 1 + 2 * -(-5 // piece_blocks)  # one to try it


def test_what_arrives_is_verified(owner: NcclOwner, reader: Reader) -> None:
    lease = owner.lease([3])
    owner.blocks[3, 5] ^= 1
    with pytest.raises(TransferError, match="intact"):
        reader.pull(lease, [0], ids(0))


@pytest.mark.parametrize("piece_blocks", [1, 4])
def test_heads_are_split_again_on_the_way(piece_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From two ranks' pools with half of the heads each into one with all heads."""
    layout = full_attention(2, 2, 8, "float32")
    whole = torch.arange(6 * 2 * 2 * 2 * 4 * 8, dtype=torch.float32).view(6, 2, 2, 2, 4, 8)
    halves = [whole[:, :, :, rank : rank + 1].contiguous() for rank in range(2)]
    geometries = [PoolGeometry(layout, 6, 4, "test-model", Shard(rank, 2)) for rank in range(2)]
    block_bytes = geometries[0].block_bytes
    monkeypatch.setattr(nccl_pool, "PIECE_BYTES", piece_blocks * block_bytes)
    table = LeaseTable(Epoch(1))
    lease = table.grant(ids(4, 0, 5), time.monotonic(), 60.0)
    server = NcclServer("127.0.0.1", "", "owner", Epoch(1))
    for half in halves:
        server.add(NcclPool(DevicePool(half), FakeNccl("GPU-owner")), block_bytes)
    server.serve(Leases(table))
    reader = Reader()
    try:
        rows = [half.view(6, -1).view(torch.uint8).numpy()[[4, 0, 5]] for half in halves]
        name = (lease.lease_id, WorkerId("owner"), Epoch(1))
        address = ShardAddress("127.0.0.1:1", transports={"nccl": f"{server.port} GPU-owner".encode()})
        shards = tuple(
            PeerShard(*name, geometry, address, lease.block_ids, tuple(digest_blocks(row)), rank)
            for rank, (geometry, row) in enumerate(zip(geometries, rows, strict=True))
        )
        assert reader.pull(PeerLease(*name, 12, 10.0, shards), [0, 2], ids(1, 6)) == "nccl"
        wanted = whole.view(6, -1).view(torch.uint8).numpy()[[4, 5]]
        np.testing.assert_array_equal(reader.blocks[[1, 6]], wanted)
        assert num_links(reader) == 2
    finally:
        reader.client.close()
        server.close()


def test_a_lease_must_hold_and_the_communicator_survives_a_refusal(owner: NcclOwner, reader: Reader) -> None:
    good = owner.lease([3, 4])
    assert reader.pull(good, [0], ids(0)) == "nccl"
    for lease, reason in (
        (with_shard(good, lease_id=LeaseId("guess")), "unknown or released"),
        (owner.lease([3], seconds=0.0), "expired"),
        (with_shard(good, block_ids=tuple(ids(3, 4, 5)), digests=(0, 0, 0)), "outside the lease"),
    ):
        with pytest.raises(TransferError, match=reason):
            reader.pull(lease, [lease.num_blocks - 1], ids(0))
    assert reader.pull(good, [1], ids(0)) == "nccl"
    assert len(reader.fake.links) == 1
    wait_until(lambda: not owner.holder.held)


@pytest.mark.parametrize(
    "request_", [7, [], ["x", [0]], ["x", [], []], ["x", [0], [2]], ["x", [0, 1], [3, -1]], ["x", [0], []],
                 ["x", ["0"], [1]], ["x", [True], [1]]]
)  # fmt: skip
def test_malformed_requests_are_refused(owner: NcclOwner, reader: Reader, request_: object) -> None:
    lease = owner.lease([3, 4])
    reader.transport.pull(pull_of_one(lease))
    (pair,) = reader.transport._pairs.values()
    assert pair.connection is not None
    with pytest.raises(TransferError, match=r"malformed|pieces"):
        pair.connection.ask(request_)
    assert reader.pull(lease, [0], ids(0)) == "nccl"


def test_who_is_not_let_in(tmp_path: Path, owner: NcclOwner, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "RETRY_SECONDS", 0.0)
    same = Reader("GPU-owner")
    assert same.pull(owner.lease([3], shm=True), [0], ids(0)) == "shm"
    with pytest.raises(TransferError, match="GPU with itself"):  # the owner does not trust the reader in this
        same.transport.pull(pull_of_one(with_address(owner.lease([3]), nccl=f"{owner.nccl.port} GPU-x")))
    with pytest.raises(TransferError, match="epoch"):
        reader.transport.pull(pull_of_one(with_shard(owner.lease([3]), epoch=Epoch(5))))
    of_ranks = with_shard(owner.lease([3]), geometry=replace(GEOMETRY, shard=Shard(1, 2)), rank=1)
    with pytest.raises(TransferError, match="rank 1 of a worker of 1"):
        reader.transport.pull(pull_of_one(of_ranks))
    guarded = NcclOwner(tmp_path, name="guarded", token="secret")
    with pytest.raises(TransferError, match="token"):
        reader.pull(guarded.lease([3]), [0], ids(0))
    trusted = Reader(token="secret")
    assert trusted.pull(guarded.lease([3]), [0], ids(0)) == "nccl"
    assert not owner.fake.links
    trusted.client.close()
    same.client.close()
    guarded.close()


def test_strangers_bytes_end_their_connection_only(owner: NcclOwner, reader: Reader) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x01\x00\x00\x00\xc1"):
        stranger = Connection(socket.create_connection(("127.0.0.1", owner.nccl.port)))
        stranger.sock.sendall(data)
        with pytest.raises(TransferError):
            stranger.receive(100, 60.0)
        stranger.close()
    assert reader.pull(owner.lease([3]), [0], ids(0)) == "nccl"


def test_what_cannot_be_reached_is_left_to_the_next_transport_for_a_while(
    owner: NcclOwner, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.fake.refuses = reader.fake.refuses = True
    lease = owner.lease([3], shm=True)
    assert reader.pull(lease, [0], ids(0)) == "shm"
    owner.fake.refuses = reader.fake.refuses = False
    assert reader.pull(lease, [0], ids(0)) == "shm"
    assert not reader.fake.links
    monkeypatch.setattr(nccl, "RETRY_SECONDS", 0.0)
    for pair in reader.transport._pairs.values():
        pair.retry_time = 0.0
    for address in ("1 GPU-x", "nowhere", "", "99999 GPU-x", "9" * 5000):
        assert reader.pull(with_address(lease, nccl=address), [0], ids(0)) == "shm"
    assert reader.pull(lease, [0], ids(0)) == "nccl"


def test_an_owner_that_stops_during_a_pull_costs_its_deadline_and_a_new_communicator(
    owner: NcclOwner, reader: Reader
) -> None:
    lease = owner.lease([3, 4, 5], shm=True)
    assert reader.pull(lease, [0], ids(0)) == "nccl"
    owner.link.is_running.clear()
    began = time.monotonic()
    with little_patience():
        assert reader.pull(lease, [0, 1], ids(0, 1)) == "shm"  # in the same pull
    assert 0.5 <= time.monotonic() - began < 50.0
    np.testing.assert_array_equal(reader.blocks[[0, 1]], owner.blocks[[3, 4]])
    wait_until(lambda: not owner.holder.held and owner.fake.links[0].num_aborts > 0)
    assert reader.fake.links[0].num_aborts > 0
    assert len(reader.fake.links[0].kept) == 2  # slots, which late messages may still fill
    assert reader.pull(lease, [2], ids(2)) == "nccl"
    assert len(reader.fake.links) == 2


def test_a_peer_that_has_used_up_the_time_for_it_is_not_asked_by_other_ways(
    owner: NcclOwner, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FALLBACK_SECONDS", 0.3)
    lease = owner.lease([3, 4, 5], shm=True)
    assert reader.pull(lease, [0], ids(0)) == "nccl"
    owner.link.is_running.clear()
    with little_patience(), pytest.raises(TransferError, match=r"cannot be read \(nccl: [^;]*\)$"):
        reader.pull(lease, [0, 1], ids(0, 1))


def test_a_reader_that_stops_holds_up_no_other(owner: NcclOwner, reader: Reader, clock: SimpleNamespace) -> None:
    stopped = Reader("GPU-stopped")
    lease = owner.lease([3, 4])
    assert stopped.pull(lease, [0], ids(0)) == "nccl"
    first = owner.link
    (pair,) = stopped.transport._pairs.values()
    assert pair.connection is not None
    first.is_running.clear()  # a send that nobody receives: sockets would take in so little
    pair.connection.ask([lease.lease_id, [0, 1], [2]])
    assert owner.holder.held
    for _ in range(5):
        assert reader.pull(owner.lease([5, 6]), [0, 1], ids(0, 1)) == "nccl"
    wait_until(lambda: owner.holder.held == [lease.lease_id])
    clock.later = 1000.0
    wait_until(lambda: not owner.holder.held)
    clock.later = 0.0
    assert first.num_aborts > 0
    wait_until(lambda: has_ended(pair.connection))
    assert stopped.pull(lease, [0], ids(0)) == "nccl"  # it goes on, and connects anew
    stopped.client.close()


def test_an_owner_that_ends_between_pulls(tmp_path: Path, reader: Reader) -> None:
    first = NcclOwner(tmp_path)
    lease = first.lease([3])
    assert reader.pull(lease, [0], ids(0)) == "nccl"
    first.close()
    wait_until(lambda: first.link.num_aborts > 0)
    with pytest.raises(MiniInferError, match="cannot be reached"):
        reader.pull(lease, [0], ids(0))
    reborn = NcclOwner(tmp_path, seed=1)
    assert reader.pull(reborn.lease([3]), [0], ids(0)) == "nccl"
    np.testing.assert_array_equal(reader.blocks[0], reborn.blocks[3])
    reborn.close()


def test_communicators_of_lost_owners_are_ended(tmp_path: Path, owner: NcclOwner, reader: Reader) -> None:
    other = NcclOwner(tmp_path, name="other")
    reader.pull(other.lease([3]), [0], ids(0))
    other.close()
    wait_until(lambda: other.link.num_aborts > 0)
    assert num_links(reader) == 1
    reader.pull(owner.lease([3]), [0], ids(0))
    assert num_links(reader) == 1
    assert reader.fake.links[0].num_aborts == 1


def test_a_reader_that_leaves_ends_the_owners_side(owner: NcclOwner) -> None:
    reader = Reader()
    reader.pull(owner.lease([3]), [0], ids(0))
    reader.client.close()
    wait_until(lambda: owner.link.num_aborts > 0)
    wait_until(lambda: not owner.nccl._server._connections)


def test_threads_share_a_communicator(owner: NcclOwner, reader: Reader) -> None:
    lease, together = owner.lease(range(8)), threading.Barrier(4)
    failures: list[BaseException] = []

    def pull(number: int) -> None:
        together.wait()
        try:
            for _ in range(20):
                reader.pull(lease, [number, number + 4], ids(number, number + 4))
        except BaseException as error:  # noqa: BLE001  # shown by the assertion
            failures.append(error)

    threads = [threading.Thread(target=pull, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    np.testing.assert_array_equal(reader.blocks, owner.blocks)
    assert len(reader.fake.links) == 1


def own_a_pool(folder: Path, pipe: pipes.Connection) -> None:
    owner = NcclOwner(folder)
    owner.on_stall = lambda: pipe.send("stalled")
    pipe.send(handle_to_hex(as_handle(owner.lease([1, 2, 5]))))
    while True:
        owner.stall = pipe.recv()
        pipe.send("told")


class OwnerProcess:
    def __init__(self, folder: Path) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = fork(own_a_pool, folder, theirs)
        theirs.close()
        self.lease = lease_from_hex(self.word())

    def word(self) -> str:
        return self._pipe.recv()

    def stall(self) -> None:
        """Make every send hang from now on."""
        self._pipe.send(1000.0)
        assert self.word() == "told"

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("during", [False, True])
def test_an_owners_process_that_dies_or_stops(
    tmp_path: Path, reader: Reader, how: signal.Signals, during: bool, clock: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(nccl_server, "MAX_READERS", 2)
    process = OwnerProcess(tmp_path)
    try:
        assert reader.pull(process.lease, [0, 2], ids(0, 1)) == "nccl"
        process.stall()

        def end_in_a_send() -> None:
            assert process.word() == "stalled"
            process.signal(how)
            if how is signal.SIGSTOP:  # nothing else shows it
                clock.later = 1000.0

        ending = threading.Thread(target=end_in_a_send if during else lambda: process.signal(how))
        ending.start()
        if not during:
            ending.join()
        began = time.monotonic()
        patience = contextlib.nullcontext() if during else little_patience(reply_seconds=0.3)
        with patience, pytest.raises(MiniInferError):
            reader.pull(process.lease, [0, 1, 2], ids(0, 1, 2))
        assert time.monotonic() - began < 50.0
        ending.join()
        clock.later = 0.0
        assert num_links(reader) == 0
        (tmp_path / "other").mkdir()
        other = NcclOwner(tmp_path / "other", name="other")
        assert reader.pull(other.lease([3]), [0], ids(0)) == "nccl"
        other.close()
    finally:
        process.kill()
