"""Blocks between the pools of two workers on GPUs that NCCL connects."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from kvstore.handle.handle import HandleWriter, open_handle
from kvstore.pool.block_pool import BlockPool
from kvstore.types import BlockId
from tests.harness.waiting import wait_until
from tests.kvstore.conftest import patience  # noqa: F401 - for all tests of this file
from tests.kvstore.helpers import GEOMETRY
from tests.worker.kv.test_shared_pool import open_memory
from tests.worker.nccl.fake_nccl import FakeNccl
from worker.gpu_hand_off.device_pool import DevicePool
from worker.nccl import transport as nccl_transport
from worker.nccl.pool import NcclPool


def nccl_on(kv_pool: torch.Tensor, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Place the next pool on that GPU, as NCCL sees it."""
    monkeypatch.setattr(nccl_transport, "open_nccl", lambda _: NcclPool(DevicePool(kv_pool), FakeNccl(gpu)))


def test_blocks_travel_by_nccl_from_one_worker_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is real except the GPUs: memory, leases of the engine, handles, and the reader's choice of transport."""
    (tmp_path / "owner").mkdir()
    sent, received = (torch.randn(GEOMETRY.num_blocks, GEOMETRY.block_bytes // 4) for _ in range(2))
    nccl_on(sent, "GPU-1", monkeypatch)
    owner = open_memory(tmp_path / "owner", "auto")
    nccl_on(received, "GPU-2", monkeypatch)
    reader = open_memory(tmp_path, "auto")
    assert list(reader.clients[0].transports) == ["nccl", "shm", "tcp"]
    pool, device_pool = BlockPool(GEOMETRY.num_blocks), DevicePool(sent)
    writer = HandleWriter("reader", owner.serve("127.0.0.1:1"), 60.0)
    leases = owner.open_leases(pool.release, writer)
    block_ids = pool.allocate(3)
    lease, handle = leases.grant(block_ids, [device_pool.digests(block_ids)], 12, time.monotonic())
    [client] = reader.clients
    assert client.pull(open_handle(handle), [0, 2], [BlockId(5), BlockId(1)]) == "nccl"
    assert torch.equal(received[[5, 1]], sent[[block_ids[0], block_ids[2]]])
    assert leases.release(lease.lease_id, lease.epoch)
    wait_until(lambda: not leases.expire(time.monotonic()) and not len(leases))
    assert pool.num_used == 0
    client.close()
    for memory in (owner, reader):
        memory.close()
