"""Creates pools in GPU memory: allocated by this process, or by a rank in another process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.errors import ConfigError
from engine.kv.memory import allocate_pool
from kvstore.handle.handle import PoolInfo
from kvstore.layout import WHOLE
from kvstore.transports.transport import LocalPool
from worker.config import WorkerConfig
from worker.gpu_hand_off.pinned_staging import HostRows
from worker.gpu_hand_off.rank_pool import DeviceRankPool
from worker.gpu_hand_off.settings import GpuHandOffSettings


def allocate_on(
    device: torch.device, info: PoolInfo, socket_path: str, config: WorkerConfig, transports: Sequence[str]
) -> DeviceRankPool:
    """Allocate this process's pool. transports: those with which this worker may read peers. Raises ConfigError."""
    geometry = info.geometry
    staging_bytes = int(config.of(GpuHandOffSettings).kv_staging_gb * 1e9)
    num_rows = min(staging_bytes // geometry.block_bytes, geometry.num_blocks)
    if num_rows == 0:
        raise ConfigError(f"--kv-staging-gb holds no block of {geometry.block_bytes / 1e9:.3f} GB")
    shared = None
    if "cuda_ipc" in transports or geometry.shard != WHOLE:  # other processes map it
        from engine.cuda_ipc.device_memory import pool_for_others

        shared = pool_for_others(geometry, device)
    kv_pool, fd = shared or (allocate_pool(geometry, device), None)
    return DeviceRankPool(info, socket_path, kv_pool, fd, HostRows(num_rows))


def adopt_on(device: torch.device, info: PoolInfo, socket_path: str, fd: int, first: LocalPool) -> DeviceRankPool:
    """Map the pool that a rank in another process has allocated. first: rank 0's pool, whose rows all ranks share."""
    from engine.cuda_ipc.device_memory import pool_of_rank

    assert isinstance(first, DeviceRankPool), "ranks are all on GPUs, or none"
    return DeviceRankPool(info, socket_path, pool_of_rank(info.geometry, device, fd), fd, first.rows)
