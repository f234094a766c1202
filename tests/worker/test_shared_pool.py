"""Which transports a worker uses and offers: what it has, and what it was told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError, TransferError
from kvstore.layout import PoolGeometry, Shard, full_attention
from kvstore.tier.agent_client import AgentHostTier
from kvstore.transport import cuda_memory
from kvstore.types import BlockId
from tests.kvstore.helpers import GEOMETRY, Owner, with_address
from tests.kvstore.tier.test_agent import KEYS, Agent
from worker.shared_pool import SharedPoolMemory

CPU = torch.device("cpu")


def open_memory(folder: Path, kv_transport: str, geometry: PoolGeometry = GEOMETRY) -> SharedPoolMemory:
    memory = SharedPoolMemory("reader", str(folder), "", 1 << 20, kv_transport)
    memory.allocate(geometry, CPU)
    return memory


@pytest.mark.parametrize(
    ("wanted", "transports"), [("auto", ("shm", "tcp")), ("shm", ("shm",)), ("tcp", ("tcp",))]
)  # fmt: skip
def test_a_cpu_worker_has_what_it_was_told(tmp_path: Path, wanted: str, transports: tuple[str, ...]) -> None:
    memory = open_memory(tmp_path, wanted)
    assert (memory.transports, memory.cuda_socket_path, memory.needs_staging) == (transports, "", False)
    memory.close()


def test_gpu_memory_cannot_be_asked_for_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose auto, shm or tcp"):
        open_memory(tmp_path, "cuda_ipc")


def test_only_what_was_asked_for_is_tried(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    peer = with_address(owner.peer([3]), cuda_socket="/nowhere", kv_address="127.0.0.1:1")
    for wanted, works in (("auto", True), ("shm", True), ("tcp", False)):
        memory = open_memory(tmp_path, wanted)
        client = memory.clients("")[0]
        if works:
            assert client.pull(peer, [0], [BlockId(0)]).transport == "shm"
        else:
            with pytest.raises(TransferError, match="tcp: the peer does not answer"):
                client.pull(peer, [0], [BlockId(0)])
        client.close()
        memory.close()
    owner.close()


def test_ranks_share_host_slots_only_of_the_same_heads(tmp_path: Path) -> None:
    agent = Agent(tmp_path, num_regions=2)
    try:
        geometries = [replace(GEOMETRY, shard=Shard(rank, 4)) for rank in range(4)]  # of two heads
        tiers = [AgentHostTier(agent.socket, one.content_name, one.block_bytes) for one in geometries]
        slots = tiers[0].reserve(KEYS[:2])
        assert slots is not None
        tiers[0].commit(slots)
        assert [len(tier.lookup(KEYS)) for tier in tiers] == [2, 2, 0, 0]
        for tier in tiers:
            tier.close()
    finally:
        agent.stop()


def test_blocks_that_are_no_whole_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        open_memory(
            tmp_path,
            "auto",
            replace(GEOMETRY, layout=full_attention(1, 1, 1, "bfloat16"), block_size=1),
        )


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
    memory = SharedPoolMemory("reader", str(tmp_path), "", 1 << 20, "auto")
    with pytest.raises(ConfigError, match=r"not free on GPU 0: .* 0\.5 GB free\. Lower --gpu-memory-fraction"):
        memory.allocate(GEOMETRY, torch.device("cuda", 0))
    memory.close()
