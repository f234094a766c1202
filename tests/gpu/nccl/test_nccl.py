"""Pools of two GPUs connected by NCCL, between real processes: pulled data, and failures that hang nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.errors import MiniInferError
from kvstore.handle.handle import HandleWriter, PeerLease
from kvstore.pool.leases import LeaseTable
from kvstore.transports.client import KvClient
from kvstore.types import BlockId, Epoch, LeaseId
from tests.gpu.kv.test_kv_sharing import GEOMETRY, pattern
from tests.harness.waiting import wait_until
from tests.kvstore.helpers import handle_to_hex, lease_from_hex
from worker.config import WorkerConfig
from worker.gpu_hand_off.rank_pool import DeviceRankPool
from worker.kv.shared_pool import SharedPoolMemory
from worker.nccl import pool as nccl_pool

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SCATTERED = [5, 699, 17, 0, 300]
RUN = list(range(100, 400))  # 275 MB: several pieces
LEASE_SECONDS = 600.0


class Holder:
    """The owner's leases. lingers: seconds before each send, in which a test can stop a process."""

    def __init__(self, table: LeaseTable, lingers: float) -> None:
        self._table = table
        self._lingers = lingers
        self.num_held = 0

    def hold(self, lease_id: LeaseId, epoch: Epoch, positions: Sequence[int]) -> list[BlockId]:
        found = self._table.resolve(lease_id, epoch, positions, time.monotonic())
        self.num_held += 1
        time.sleep(self._lingers)
        return found

    def let_go(self, lease_id: LeaseId) -> None:
        self.num_held -= 1


def open_memory(name: str, folder: Path) -> SharedPoolMemory:
    return SharedPoolMemory(
        WorkerConfig(worker_id=name, run_dir=str(folder), kv_staging_gb=0.064, kv_transport="nccl")  # type: ignore[call-arg]
    )


class Owner:
    """A pool on a GPU with the known pattern, offered only by NCCL."""

    def __init__(self, folder: Path, device: str, lingers: float = 0.0, name: str = "owner") -> None:
        self.memory = open_memory(name, folder)
        self.kv_pool = self.memory.allocate(GEOMETRY, torch.device(device))
        self.kv_pool.view(GEOMETRY.num_blocks, -1).view(torch.int64).copy_(pattern(device))
        torch.cuda.synchronize(device)
        self.table = LeaseTable(self.memory.epoch)
        self.holder = Holder(self.table, lingers)
        (self._shard,) = self.memory.serve("127.0.0.1:1")
        for transport in self.memory._transports.values():
            transport.serve(self.holder)
        self._name = name

    def grant(self, numbers: Sequence[int]) -> str:
        """Grant a lease. Returns its handle in hexadecimal."""
        own = self.memory.ranks[0]
        assert isinstance(own, DeviceRankPool)
        block_ids = list(map(BlockId, numbers))
        digests = own.device.digests(block_ids)
        lease = self.table.grant(block_ids, time.monotonic(), LEASE_SECONDS)
        address = self._shard.address
        shard = replace(self._shard, address=replace(address, transports={"nccl": address.transports["nccl"]}))
        writer = HandleWriter(self._name, [shard], LEASE_SECONDS)
        return handle_to_hex(writer.write(lease, 16 * len(block_ids), [digests]))


def be_owner(folder: Path, device: str, lingers: float) -> None:
    """Run an owner process: answers "held" with the number of holds, other lines with a handle on a new lease."""
    owner = Owner(folder, device, lingers)
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "held\n":
            print(owner.holder.num_held, flush=True)
        else:
            print(owner.grant(SCATTERED if line == "scattered\n" else RUN), flush=True)


def be_reader(folder: Path, device: str, handle: str) -> None:
    """Run a reader process, which pulls repeatedly."""
    memory = open_memory("other-reader", folder)
    memory.allocate(GEOMETRY, torch.device(device))
    client, lease = memory.clients[0], lease_from_hex(handle)
    while True:
        client.pull(lease, range(lease.num_blocks), list(map(BlockId, range(lease.num_blocks))))
        print("pulled", flush=True)


class Process:
    def __init__(self, role: str, *arguments: object) -> None:
        code = (
            "import sys; from pathlib import Path; from tests.gpu.nccl import test_nccl as t; a = sys.argv;"
            "t.be_owner(Path(a[2]), a[3], float(a[4])) if a[1] == 'owner' else t.be_reader(Path(a[2]), a[3], a[4])"
        )
        argv = [sys.executable, "-c", code, role, *map(str, arguments)]
        env = os.environ | {"NCCL_DEBUG_FILE": "/dev/stderr"}  # otherwise NCCL writes between the answers
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.read()

    def grant(self, what: str) -> PeerLease:
        return lease_from_hex(self.ask(what))

    def signal(self, how: signal.Signals) -> None:
        os.kill(self.process.pid, how)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def one(role: str, *arguments: object) -> Process:
        started.append(Process(role, *arguments))
        return started[-1]

    yield one
    for process in started:
        process.end()


Mine = tuple[torch.Tensor, KvClient]


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Mine]:
    memory = open_memory("reader", tmp_path)
    kv_pool = memory.allocate(GEOMETRY, torch.device("cuda:0"))
    client = memory.clients[0]
    yield kv_pool.view(GEOMETRY.num_blocks, -1).view(torch.int64), client
    client.close()
    memory.close()


def pull(client: KvClient, lease: PeerLease, local: Sequence[int]) -> float:
    """Pull all blocks of the lease. Returns the seconds it took."""
    began = time.monotonic()
    assert client.pull(lease, range(lease.num_blocks), list(map(BlockId, local)), 20.0) == "nccl"
    return time.monotonic() - began


def test_blocks_arrive(tmp_path: Path, start: Callable[..., Process], mine: Mine) -> None:
    words, client = mine
    owner, want = start("owner", tmp_path, "cuda:1", 0.0), pattern("cuda:0")
    local = [3, 4, 698, 0, 77]
    first = pull(client, owner.grant("scattered"), local)
    assert torch.equal(words[local], want[SCATTERED])
    words[local] = 0
    assert not words.any()
    seconds = []
    for _ in range(5):
        local = list(reversed(range(len(RUN))))
        seconds.append(pull(client, owner.grant("run"), local))
        assert torch.equal(words[local], want[RUN])
        words[local] = 0
    assert not words.any()
    rate = len(RUN) * GEOMETRY.block_bytes / min(seconds) / 1e9
    print(f"first pull, with connecting {first:.2f} s; 300 blocks {min(seconds) * 1e3:.2f} ms, {rate:.0f} GB/s")


def test_pieces_that_are_gathered(
    tmp_path: Path, start: Callable[..., Process], mine: Mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_pool, "PIECE_BYTES", GEOMETRY.block_bytes)
    words, client = mine
    owner = start("owner", tmp_path, "cuda:1", 0.0)
    pull(client, owner.grant("scattered"), range(5))
    monkeypatch.setattr(nccl_pool, "PIECE_BYTES", 2 * GEOMETRY.block_bytes)
    pull(client, owner.grant("scattered"), range(5, 10))
    want = pattern("cuda:0")[SCATTERED]
    assert torch.equal(words[:5], want)
    assert torch.equal(words[5:10], want)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("lingers", [0.0, 1.0])  # between pulls, and during one
def test_an_owner_that_dies_or_stops(
    how: signal.Signals, lingers: float, tmp_path: Path, start: Callable[..., Process], mine: Mine
) -> None:
    words, client = mine
    owner = start("owner", tmp_path, "cuda:1", lingers)
    lease = owner.grant("run")
    pull(client, lease, range(300))
    timer = threading.Timer(lingers / 2, owner.signal, [how])
    timer.start()
    if not lingers:
        timer.join()
    began = time.monotonic()
    with pytest.raises(MiniInferError):
        pull(client, lease, range(300))
    seconds = time.monotonic() - began
    print(f"{how.name} of the owner, {'during a' if lingers else 'between'} pull: {seconds:.2f} s")
    assert seconds < 8.0
    (tmp_path / "other").mkdir()
    other = start("owner", tmp_path / "other", "cuda:1", 0.0)
    words.zero_()
    pull(client, other.grant("scattered"), range(5))
    assert torch.equal(words[:5], pattern("cuda:0")[SCATTERED])
    torch.cuda.synchronize()  # the context is intact, and no kernel waits any more


def seconds_of_the_failing_pull(client: KvClient, lease: PeerLease) -> float:
    ended = time.monotonic() + 20
    while (began := time.monotonic()) < ended:
        try:
            pull(client, lease, range(300))
        except MiniInferError as error:
            print(error)
            return time.monotonic() - began
    pytest.fail("no pull has failed")


@pytest.mark.parametrize("seconds", [0.5, 0.52, 0.55, 0.6])
def test_an_owner_that_stops_at_any_time(
    seconds: float, tmp_path: Path, start: Callable[..., Process], mine: Mine
) -> None:
    """It stops while pulls follow each other without a pause, so most likely in the middle of messages."""
    _, client = mine
    owner = start("owner", tmp_path, "cuda:1", 0.0)
    lease = owner.grant("run")
    pull(client, lease, range(300))
    timer = threading.Timer(seconds, owner.signal, [signal.SIGSTOP])
    timer.start()
    last = seconds_of_the_failing_pull(client, lease)
    timer.join()
    print(f"SIGSTOP of the owner among pulls: the last took {last:.2f} s")
    assert last < 8.0
    torch.cuda.synchronize()


def test_a_reader_that_stops(tmp_path: Path, start: Callable[..., Process]) -> None:
    """The owner, in this process, keeps granting, and its device becomes free again."""
    owner = Owner(tmp_path, "cuda:0")
    try:
        reader = start("reader", tmp_path, "cuda:1", owner.grant(RUN))
        for _ in range(20):
            assert reader.read() == "pulled"
        reader.signal(signal.SIGSTOP)
        for _ in range(10):
            began = time.monotonic()
            owner.grant(SCATTERED)
            assert time.monotonic() - began < 3.0
        wait_until(lambda: not owner.holder.num_held, 8.0)
        (tmp_path / "other").mkdir()
        other = start("reader", tmp_path / "other", "cuda:1", owner.grant(RUN))
        assert other.read() == "pulled"
        torch.cuda.synchronize("cuda:0")
    finally:
        owner.memory.close()
