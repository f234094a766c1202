"""The transports that a worker uses and offers, by its installation and its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError, TransferError, UnavailableError
from kvstore.handle.handle import ShardAddress
from kvstore.layout import PoolGeometry, full_attention
from kvstore.types import BlockId
from tests.kvstore.conftest import patience  # noqa: F401 - for all tests of this file
from tests.kvstore.helpers import GEOMETRY, Owner, with_address
from worker.config import AUTO, TRANSPORTS, WorkerConfig
from worker.kv import shared_pool
from worker.kv.shared_pool import SharedPoolMemory, load_transports

CPU = torch.device("cpu")


def open_memory(folder: Path, kv_transport: str, geometry: PoolGeometry = GEOMETRY) -> SharedPoolMemory:
    memory = SharedPoolMemory(WorkerConfig(worker_id="reader", run_dir=str(folder), kv_transport=kv_transport))
    memory.allocate(geometry, CPU)
    return memory


@pytest.mark.wing("worker.tcp")
@pytest.mark.parametrize(
    ("wanted", "transports"), [("auto", ["shm", "tcp"]), ("shm", ["shm"]), ("tcp", ["tcp"])]
)  # fmt: skip
def test_a_cpu_worker_has_what_it_was_told(tmp_path: Path, wanted: str, transports: list[str]) -> None:
    memory = open_memory(tmp_path, wanted)
    (shard,) = memory.serve("host:1")
    socket_path = str(tmp_path / "reader.kv.sock").encode()
    assert shard.address == ShardAddress("host:1", False, {"shm": socket_path, "tcp": b""})
    assert (list(memory.clients[0].transports), memory.needs_staging) == (transports, False)
    memory.close()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        pytest.param("cuda_ipc", "choose auto, shm or tcp", marks=pytest.mark.wing("worker.cuda_ipc")),
        pytest.param("nccl", "needs a GPU and libnccl", marks=pytest.mark.wing("worker.nccl")),
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
    assert "shm" in before
    monkeypatch.setitem(TRANSPORTS, "pigeon", "kvstore.transports.pigeon.reader:PigeonTransport")
    assert [kind.name for kind in load_transports("shm")] == before


@pytest.mark.wing("worker.tcp")
def test_only_what_was_asked_for_is_tried(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    peer = with_address(owner.peer([3]), "127.0.0.1:1", cuda_ipc="/nowhere", tcp="")
    for wanted, works in (("auto", True), ("shm", True), ("tcp", False)):
        memory = open_memory(tmp_path, wanted)
        client = memory.clients[0]
        if works:
            assert client.pull(peer, [0], [BlockId(0)]) == "shm"
        else:
            with pytest.raises(TransferError, match="tcp: the peer does not answer"):
                client.pull(peer, [0], [BlockId(0)])
        client.close()
        memory.close()
    owner.close()


def test_a_pool_in_gpu_memory_is_of_one_process_where_nothing_hands_it_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_pool, "from_wing", lambda path: None)
    memory = SharedPoolMemory(WorkerConfig(worker_id="gpu", run_dir=str(tmp_path)))
    assert memory.allocate(GEOMETRY, torch.device("meta")).shape == (GEOMETRY.num_blocks, *GEOMETRY.block_shape)
    assert (list(memory.clients[0].transports), memory.needs_staging, memory.serve("host:1")) == ([], False, [])
    owner = Owner(tmp_path)
    with pytest.raises(UnavailableError, match="no transport in common"):
        memory.clients[0].pull(owner.peer([3]), [0], [BlockId(0)])
    owner.close()
    memory.close()


def test_blocks_that_are_no_whole_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        open_memory(tmp_path, "auto", replace(GEOMETRY, layout=full_attention(1, 1, 1, "bfloat16"), block_size=1))
