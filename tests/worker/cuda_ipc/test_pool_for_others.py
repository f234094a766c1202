"""GPU memory for a pool that others map, where it is not to be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from kvstore.transports.cuda_ipc import cuda_memory
from tests.kvstore.conftest import patience  # noqa: F401 - for all tests of this file
from tests.kvstore.helpers import GEOMETRY
from worker.config import WorkerConfig
from worker.kv.shared_pool import SharedPoolMemory


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
