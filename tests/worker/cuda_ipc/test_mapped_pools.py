"""Pools that others map: a pull copies the right bytes (the device is the CPU), and mapping may fail."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from kernels.kv_copies import kernels_for
from kvstore.pool.digest import digest_blocks
from kvstore.transports.cuda_ipc import cuda_memory
from kvstore.transports.cuda_ipc.cuda_memory import CudaMemory
from tests.kvstore.conftest import patience  # noqa: F401 - for all tests of this file
from tests.kvstore.helpers import GEOMETRY, ids
from worker.config import WorkerConfig
from worker.cuda_ipc import mapped_pulls
from worker.cuda_ipc.mapped_pulls import AttachedPool, MappedPulls
from worker.gpu_hand_off.device_pool import DevicePool
from worker.kv.shared_pool import SharedPoolMemory

NUM_BLOCKS = 6


def test_a_pull_from_an_attached_pool() -> None:
    kv_pool = torch.randn(NUM_BLOCKS, 2, 2, 1, 4, 8)
    own = kv_pool.view(NUM_BLOCKS, -1).view(torch.uint8).numpy()
    other = torch.randint(-(2**62), 2**62, (3, own.shape[1] // 8))
    attached, pulls = AttachedPool(CudaMemory.__new__(CudaMemory), other), MappedPulls(DevicePool(kv_pool))
    assert pulls.pull(attached, ids(2, 0), ids(1, 5)) == digest_blocks(other[[2, 0]].numpy().view(np.uint8))
    np.testing.assert_array_equal(own[[1, 5]], other[[2, 0]].numpy().view(np.uint8))
    assert pulls.pull(attached, [], []) == []


def test_the_kernel_is_launched_before_a_pull_and_changes_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kv_pool = torch.randn(NUM_BLOCKS, 2, 2, 1, 4, 8)
    before, kernels = kv_pool.clone(), Mock(wraps=kernels_for(on_gpu=False))
    monkeypatch.setattr(mapped_pulls, "kernels_for", lambda on_gpu: kernels)
    MappedPulls(DevicePool(kv_pool))
    assert [name for name, *_ in kernels.method_calls] == ["copy_blocks"]
    assert torch.equal(kv_pool, before)


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
