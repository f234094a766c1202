"""A worker's GPU pool, with the CPU as the device: allocation, hand-off and refusals."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from engine.kv.memory import allocate_pool
from kvstore.handle.handle import HandleWriter, open_handle
from kvstore.layout import PoolGeometry
from kvstore.pool.block_pool import BlockPool
from tests.kvstore.helpers import GEOMETRY
from worker.config import WorkerConfig
from worker.gpu_hand_off import allocation, rank_pool
from worker.gpu_hand_off.rank_pool import DeviceRankPool
from worker.gpu_hand_off.shm_reader import DeviceShmReader
from worker.gpu_hand_off.staged_leases import StagedLeases
from worker.kv.shared_pool import SharedPoolMemory

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(geometry: PoolGeometry, _device: torch.device) -> torch.Tensor:
        return allocate_pool(geometry, torch.device("cpu"))

    monkeypatch.setattr(allocation, "allocate_pool", allocate)
    monkeypatch.setattr(rank_pool, "pin", lambda memory: None)


def open_memory(folder: Path, **settings: object) -> SharedPoolMemory:
    config = WorkerConfig(worker_id="gpu", run_dir=str(folder), **{"kv_transport": "shm", **settings})  # type: ignore[arg-type]
    return SharedPoolMemory(config)


def test_blocks_of_a_lease_are_found_in_the_rows_in_front(tmp_path: Path) -> None:
    memory = open_memory(tmp_path, kv_staging_gb=4 * GEOMETRY.block_bytes / 1e9)
    kv_pool = memory.allocate(GEOMETRY, GPU)
    kv_pool.copy_(torch.randn(kv_pool.shape))
    [own], [client] = memory.ranks, memory.clients
    assert isinstance(own, DeviceRankPool)
    assert isinstance(client._readers["shm"], DeviceShmReader)
    assert own.host_blocks.shape == (4, GEOMETRY.block_bytes)
    [shard] = memory.serve("host:1")
    assert (list(memory.clients[0].transports), shard.address.needs_staging) == (["shm"], True)
    pool = BlockPool(GEOMETRY.num_blocks)
    leases = memory.open_leases(pool.release, HandleWriter("gpu", [shard], 60.0))
    assert isinstance(leases, StagedLeases)
    block_ids = pool.allocate(3)
    lease, handle = leases.grant(block_ids, leases.digests(block_ids), 12, time.monotonic())
    rows = leases.stage(lease.lease_id, 1)
    assert rows is not None
    blocks = kv_pool.view(GEOMETRY.num_blocks, -1).view(torch.uint8).numpy()
    assert (own.host_blocks[rows] == blocks[block_ids[1:]]).all()
    assert len(open_handle(handle).shards[0].digests) == 3
    memory.fence()
    memory.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_staging_gb": 1e-9}, "--kv-staging-gb holds no block"),
        pytest.param(
            {"kv_transport": "cuda_ipc"}, "choose auto, shm or tcp", marks=pytest.mark.wing("worker.cuda_ipc")
        ),
    ],
)
def test_what_cannot_be_handed_over_is_refused(
    tmp_path: Path, settings: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cuda_ipc.device_memory.pool_for_others", lambda geometry, device: None)
    with pytest.raises(ConfigError, match=message):
        open_memory(tmp_path, **settings).allocate(GEOMETRY, GPU)
