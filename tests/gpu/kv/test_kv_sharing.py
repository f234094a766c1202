"""Pools in GPU memory shared between real processes: pulled data, the owner's death, and freed memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.errors import MiniInferError, TransferError
from kvstore.handle.handle import HandleShard, HandleWriter
from kvstore.layout import PoolGeometry, full_attention
from kvstore.pool.leases import LeaseTable
from kvstore.transports.client import KvClient
from tests.harness.waiting import wait_until
from tests.kvstore.helpers import handle_to_hex, ids, lease_from_hex, with_shard
from worker.config import WorkerConfig
from worker.gpu_hand_off.rank_pool import DeviceRankPool
from worker.kv.shared_pool import SharedPoolMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GEOMETRY = PoolGeometry(full_attention(28, 4, 128, "bfloat16"), 700, 16, "test-model")  # 642 MB
BLOCKS = [5, 699, 17, 0, 300]


def pattern(device: str) -> torch.Tensor:
    """Return the contents of the owner's pool: int64 (num_blocks, num_words)."""
    num_words = GEOMETRY.block_bytes // 8
    words = torch.arange(GEOMETRY.num_blocks * num_words, device=device).view(GEOMETRY.num_blocks, num_words)
    return words * 0x9E3779B97F4A7C15


def open_memory(name: str, folder: Path) -> SharedPoolMemory:
    config = WorkerConfig(worker_id=name, run_dir=str(folder), kv_staging_gb=0.064)  # type: ignore[call-arg]
    return SharedPoolMemory(config)


def be_owner(folder: Path, device: str) -> None:
    """Run the other process, which serves its pool and prints a handle."""
    memory = open_memory("owner", folder)
    kv_pool = memory.allocate(GEOMETRY, torch.device(device))
    kv_pool.view(GEOMETRY.num_blocks, -1).view(torch.int64).copy_(pattern(device))
    torch.cuda.synchronize(device)  # digests are of complete blocks, on a stream of their own
    block_ids = ids(*BLOCKS)
    digests = [rank.digests(block_ids) for rank in memory.ranks]
    (shard,) = memory.serve("")
    address = replace(shard.address, transports={"cuda_ipc": shard.address.transports["cuda_ipc"]})
    lease = LeaseTable(memory.epoch).grant(block_ids, time.monotonic(), 10.0)
    handle = HandleWriter("owner", [HandleShard(GEOMETRY, address)], 10.0).write(lease, 80, digests)
    print(handle_to_hex(handle), flush=True)
    sys.stdin.read()


class OwnerProcess:
    def __init__(self, folder: Path, device: str = "cuda:0") -> None:
        code = (
            "import sys; from pathlib import Path; from tests.gpu.kv.test_kv_sharing import be_owner;"
            "be_owner(Path(sys.argv[1]), sys.argv[2])"
        )
        argv = [sys.executable, "-c", code, str(folder), device]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.peer = lease_from_hex(self.process.stdout.readline().decode())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        assert self.process.returncode == -signal.SIGKILL


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[OwnerProcess]:
    owner = OwnerProcess(tmp_path)
    yield owner
    if owner.process.poll() is None:
        owner.kill()


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[tuple[torch.Tensor, KvClient, SharedPoolMemory]]:
    memory = open_memory("reader", tmp_path)
    kv_pool = memory.allocate(GEOMETRY, torch.device("cuda:0"))
    client = memory.clients[0]
    yield kv_pool.view(GEOMETRY.num_blocks, -1).view(torch.int64), client, memory
    client.close()
    memory.close()


Mine = tuple[torch.Tensor, KvClient, SharedPoolMemory]


def test_blocks_of_another_process_arrive(owner: OwnerProcess, mine: Mine) -> None:
    words, client, _ = mine
    assert client.pull(owner.peer, [0, 1, 2, 4], ids(3, 4, 5, 698)) == "cuda_ipc"
    want = pattern("cuda:0")
    assert torch.equal(words[[3, 4, 5, 698]], want[[5, 699, 17, 300]])
    words[[3, 4, 5, 698]] = 0
    assert not words.any()


def test_wrong_bytes_are_refused(owner: OwnerProcess, mine: Mine) -> None:
    _, client, _ = mine
    wrong = with_shard(owner.peer, digests=(1,) * len(BLOCKS))
    with pytest.raises(TransferError, match="intact"):
        client.pull(wrong, [0], ids(0))


def test_a_pull_waits_for_steps_that_may_still_write_its_blocks(owner: OwnerProcess, mine: Mine) -> None:
    words, client, memory = mine
    own = memory.ranks[0]
    assert isinstance(own, DeviceRankPool)
    client.pull(owner.peer, [0], ids(0))  # mapped
    for _ in range(5):
        torch.cuda._sleep(20_000_000)  # a step in flight, about 10 ms
        words[:4] = -1  # and its last write
        own.device.fence()
        client.pull(owner.peer, [0, 1], ids(2, 1))
        assert torch.equal(words[[2, 1]], pattern("cuda:0")[[5, 699]])


def test_the_owners_death_gives_an_error_and_its_memory_back(tmp_path: Path, owner: OwnerProcess, mine: Mine) -> None:
    words, client, _ = mine
    client.pull(owner.peer, [0], ids(0))
    before = torch.cuda.mem_get_info()[0]
    owner.kill()
    wait_until(lambda: torch.cuda.mem_get_info()[0] - before > GEOMETRY.pool_bytes)
    with pytest.raises(MiniInferError):
        client.pull(owner.peer, [0], ids(1))
    reborn = OwnerProcess(tmp_path)
    client.pull(reborn.peer, [2], ids(2))
    assert torch.equal(words[2], pattern("cuda:0")[17])
    with pytest.raises(TransferError, match="epoch"):
        client.pull(owner.peer, [0], ids(1))
    reborn.kill()


def test_a_pull_during_the_owners_death_ends(owner: OwnerProcess, mine: Mine) -> None:
    words, client, _ = mine
    client.pull(owner.peer, [0], ids(0))
    owner.process.kill()
    ended = False
    deadline = time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        try:
            client.pull(owner.peer, [0, 1, 2, 3, 4], ids(0, 1, 2, 3, 4))
            assert torch.equal(words[[0, 4]], pattern("cuda:0")[[5, 300]])
        except MiniInferError:
            ended = True
    assert ended
    torch.cuda.synchronize()  # the context is intact


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_blocks_of_another_gpu_arrive(tmp_path: Path, mine: Mine) -> None:
    words, client, _ = mine
    owner = OwnerProcess(tmp_path, "cuda:1")
    try:
        assert client.pull(owner.peer, [0, 1], ids(3, 4)) == "cuda_ipc"
        assert torch.equal(words[[3, 4]], pattern("cuda:0")[[5, 699]])
    finally:
        owner.kill()
