"""A rank's pool in GPU memory, with staging rows in shared host memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from engine.host_tier.buffer import host_buffer_over
from engine.host_tier.pinning import pin
from kvstore.handle.handle import PoolInfo
from kvstore.transports.shm import ShmReader
from kvstore.transports.transport import LocalPool, Reader
from kvstore.types import BlockId
from worker.gpu_hand_off.device_pool import DevicePool
from worker.gpu_hand_off.pinned_staging import HostRows, StagedReader
from worker.gpu_hand_off.shm_reader import DeviceShmReader


class DeviceRankPool(LocalPool):
    """A pool that peers' GPUs may map through `fd`; others use `staging`, whose free rows are in `rows`."""

    needs_staging = True

    def __init__(self, info: PoolInfo, socket_path: str, kv_pool: Tensor, fd: int | None, rows: HostRows) -> None:
        """fd: descriptor of the device memory, now owned by this object; None: it cannot be shared."""
        super().__init__(info, socket_path, len(rows))
        self.kv_pool = kv_pool
        self.device_fd = fd
        self.device = DevicePool(kv_pool)
        self.device.digests([BlockId(0)])  # compiles the kernel before requests come, which takes 0.1 s
        self.staging = host_buffer_over(self.mapping, *self.host_blocks.shape)  # `host_blocks`, pinned below
        pin(self.staging)
        self.rows = rows

    def digests(self, block_ids: Sequence[BlockId]) -> list[int]:
        return self.device.digests(block_ids)

    def copy_out(self, block_ids: Sequence[BlockId], rows: Sequence[BlockId]) -> None:
        """Copy complete blocks to `rows`, and wait."""
        self.device.copy_out(block_ids, self.staging, rows)

    def fence(self, first: LocalPool) -> None:
        assert isinstance(first, DeviceRankPool)
        self.device.fence(of=None if first is self else first.device)

    def through_host(self, reader: Reader) -> Reader:
        staged = StagedReader(reader, self.rows, self.staging, self.device)
        return DeviceShmReader(self.device, staged, reader.leases) if isinstance(reader, ShmReader) else staged

    def close(self) -> None:
        super().close()
        if self.device_fd is not None:
            os.close(self.device_fd)
