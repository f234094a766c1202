"""Which transports a worker uses and offers: what it has, and what it was told."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError, TransferError
from kvstore.handle.handle import HandleWriter, ShardAddress, open_handle
from kvstore.layout import PoolGeometry, full_attention
from kvstore.pool.block_pool import BlockPool
from kvstore.transports.cuda_ipc import cuda_memory
from kvstore.types import BlockId
from tests.harness.waiting import wait_until
from tests.kvstore.conftest import patience  # noqa: F401 - for all tests of this file
from tests.kvstore.helpers import GEOMETRY, Owner, with_address
from tests.worker.nccl.fake_nccl import FakeNccl
from worker.config import WorkerConfig
from worker.kv.device_pool import DevicePool
from worker.kv.kv_leases import KvLeases
from worker.kv.shared_pool import SharedPoolMemory
from worker.kv.transports import AUTO, TRANSPORTS, load_transports
from worker.nccl import transport as nccl_transport
from worker.nccl.pool import NcclPool

CPU = torch.device("cpu")


def open_memory(folder: Path, kv_transport: str, geometry: PoolGeometry = GEOMETRY) -> SharedPoolMemory:
    memory = SharedPoolMemory(WorkerConfig(worker_id="reader", run_dir=str(folder), kv_transport=kv_transport))
    memory.allocate(geometry, CPU)
    return memory


@pytest.mark.parametrize(
    ("wanted", "transports"), [("auto", ["shm", "tcp"]), ("shm", ["shm"]), ("tcp", ["tcp"])]
)  # fmt: skip
def test_a_cpu_worker_has_what_it_was_told(tmp_path: Path, wanted: str, transports: list[str]) -> None:
    memory = open_memory(tmp_path, wanted)
    memory.serve()
    (shard,) = memory.shards("host:1")
    socket_path = str(tmp_path / "reader.kv.sock").encode()
    assert shard.address == ShardAddress("host:1", False, {"shm": socket_path, "tcp": b""})
    assert (memory.transports, memory.needs_staging) == (transports, False)
    memory.close()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("cuda_ipc", "choose auto, shm or tcp"),
        ("nccl", "needs a GPU and libnccl"),
        ("pigeon", r"^--kv-transport pigeon needs kvstore\.transports\.pigeon\.reader"),
    ],
)
def test_transports_that_are_not_here_are_refused(
    wanted: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRANSPORTS, "pigeon", "kvstore.transports.pigeon.reader:PigeonTransport")  # of an absent wing
    with pytest.raises(ConfigError, match=message):
        open_memory(tmp_path, wanted)


def test_transports_of_absent_wings_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [kind.name for kind in load_transports(AUTO)]
    assert {"cuda_ipc", "shm", "tcp"} <= set(before)
    monkeypatch.setitem(TRANSPORTS, "pigeon", "kvstore.transports.pigeon.reader:PigeonTransport")
    assert [kind.name for kind in load_transports("shm")] == before


def nccl_on(kv_pool: torch.Tensor, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next pool be one on that GPU, as NCCL sees it."""
    monkeypatch.setattr(nccl_transport, "open_nccl", lambda _: NcclPool(DevicePool(kv_pool), FakeNccl(gpu)))


def test_blocks_travel_by_nccl_from_one_worker_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the GPUs: memory, leases of the engine, handles, and the reader's choice."""
    (tmp_path / "owner").mkdir()
    sent, received = (torch.randn(GEOMETRY.num_blocks, GEOMETRY.block_bytes // 4) for _ in range(2))
    nccl_on(sent, "GPU-1", monkeypatch)
    owner = open_memory(tmp_path / "owner", "auto")
    nccl_on(received, "GPU-2", monkeypatch)
    reader = open_memory(tmp_path, "auto")
    assert reader.transports == ["nccl", "shm", "tcp"]
    owner.serve()
    pool, device_pool = BlockPool(GEOMETRY.num_blocks), DevicePool(sent)
    writer = HandleWriter("reader", owner.shards("127.0.0.1:1"), 60.0)
    leases = KvLeases(owner.epoch, owner.exporter(pool.release), writer, 60.0)
    owner.send_leases(leases)
    block_ids = pool.allocate(3)
    lease, handle = leases.grant(block_ids, [device_pool.digests(block_ids)], 12, time.monotonic())
    [client] = reader.clients
    assert client.pull(open_handle(handle), [0, 2], [BlockId(5), BlockId(1)]).transport == "nccl"
    assert torch.equal(received[[5, 1]], sent[[block_ids[0], block_ids[2]]])
    assert leases.release(lease.lease_id, lease.epoch)
    wait_until(lambda: not leases.expire(time.monotonic()) and not len(leases))
    assert pool.num_used == 0
    client.close()
    for memory in (owner, reader):
        memory.close()


def test_only_what_was_asked_for_is_tried(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    peer = with_address(owner.peer([3]), "127.0.0.1:1", cuda_ipc="/nowhere", tcp="")
    for wanted, works in (("auto", True), ("shm", True), ("tcp", False)):
        memory = open_memory(tmp_path, wanted)
        client = memory.clients[0]
        if works:
            assert client.pull(peer, [0], [BlockId(0)]).transport == "shm"
        else:
            with pytest.raises(TransferError, match="tcp: the peer does not answer"):
                client.pull(peer, [0], [BlockId(0)])
        client.close()
        memory.close()
    owner.close()


def test_blocks_that_are_no_whole_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        open_memory(tmp_path, "auto", replace(GEOMETRY, layout=full_attention(1, 1, 1, "bfloat16"), block_size=1))


def test_shareable_memory_that_another_process_took_meanwhile_is_a_message_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(device: int, num_bytes: int) -> None:
        raise ConfigError(f"{num_bytes} bytes are not free on GPU {device}")

    for name, value in {
        "init": None, "empty_cache": None, "mem_get_info": (5 * 10**8, 24 * 10**9), "memory_reserved": 23 * 10**9
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(cuda_memory, "can_share", lambda _: True)
    monkeypatch.setattr(cuda_memory, "create", create)
    memory = SharedPoolMemory(WorkerConfig(worker_id="reader", run_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"not free on GPU 0: .* 0\.5 GB free\. Lower --gpu-memory-fraction"):
        memory.allocate(GEOMETRY, torch.device("cuda", 0))
    memory.close()
