"""Pools of a worker's ranks, this process's and others', as it hands them to peers, reads and fills them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from engine.gpu.pinning import pin
from engine.kv.memory import host_buffer_over
from kvstore.handle.handle import ShardAddress
from kvstore.handle.pool_info import PoolInfo
from kvstore.layout import PoolGeometry
from kvstore.transports.client import KvClient, Transport, host_client, host_transports
from kvstore.transports.cuda_ipc.reader import CudaIpcTransport
from kvstore.transports.descriptor_server import DescriptorServer
from kvstore.transports.host_pull import Blocks
from kvstore.transports.lease_client import LeaseClient
from kvstore.transports.nccl.reader import NcclTransport
from kvstore.transports.nixl.agent import NixlAgent
from kvstore.transports.shared_memory import blocks_over, create_memfd, map_fd, reopen_read_only
from kvstore.types import Epoch, WorkerId
from worker.kv.device_pool import DevicePool
from worker.kv.kv_exporter import HostRows
from worker.kv.mapped_rows import MappedRowsTransport
from worker.kv.pinned_staging import StagedTransport
from worker.nccl.pool import NcclPool, open_nccl


class RankPool(Protocol):
    """The pool of one rank."""

    geometry: PoolGeometry
    host_blocks: Blocks
    """What peers read of host memory: the pool, or the rows in front of it."""
    nccl: NcclPool | None
    """Its NCCL endpoint, where that is installed and wanted."""

    def address(self, kv_address: str) -> ShardAddress:
        """Address at which peers can read it; `kv_address` is the front's."""

    def client(self, token: str, transports: Sequence[str], nixl: NixlAgent | None) -> KvClient:
        """A reader of peers' blocks into this pool, by those of `transports` (best first) that it has."""

    def serve(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Start handing out descriptors. Raises ConfigError when a socket cannot be made."""

    def close(self) -> None: ...


class HostRankPool:
    """A rank's pool on a CPU, allocated by this process. mapping, fd: its memory."""

    nccl: NcclPool | None = None

    def __init__(self, geometry: PoolGeometry, socket_path: str) -> None:
        """Raise ConfigError when the memory is not available."""
        self.geometry = geometry
        self.fd, self.mapping, self.host_blocks = _shared_blocks(geometry)
        self._socket_path = socket_path
        self._server: DescriptorServer | None = None

    def address(self, kv_address: str) -> ShardAddress:
        return ShardAddress(kv_address, self._socket_path)

    def client(self, token: str, transports: Sequence[str], nixl: NixlAgent | None) -> KvClient:
        return host_client(self.geometry, self.host_blocks, token, transports, nixl)

    def serve(self, worker_id: WorkerId, epoch: Epoch) -> None:
        info = PoolInfo(worker_id, epoch, self.geometry)
        self._server = DescriptorServer(Path(self._socket_path), info, reopen_read_only(self.fd))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        os.close(self.fd)


class DeviceRankPool:
    """A rank's pool on a GPU, with staging rows in shared host memory in front of it."""

    def __init__(
        self, geometry: PoolGeometry, kv_pool: Tensor, fd: int, socket_path: str, num_rows: int, with_nccl: bool,
        beside: HostRows | None = None,
    ) -> None:  # fmt: skip
        """fd: of the device memory, taken over; below 0: it cannot be shared. beside: see HostRows."""
        self.geometry = geometry
        self.device_pool = DevicePool(kv_pool)
        self.nccl = open_nccl(self.device_pool) if with_nccl else None
        self._staging = replace(geometry, num_blocks=num_rows)
        self._staging_fd, mapping, self.host_blocks = _shared_blocks(self._staging)
        staging = host_buffer_over(mapping, *self.host_blocks.shape)
        pin(staging)
        self.rows = HostRows(self.host_blocks, staging, beside)
        self._device_fd = fd
        self._socket_path = socket_path
        self._cuda_socket_path = str(Path(socket_path).with_suffix(".cuda.sock")) if fd >= 0 else ""
        self._servers: list[DescriptorServer] = []

    def address(self, kv_address: str) -> ShardAddress:
        return ShardAddress(kv_address, self._socket_path, self._cuda_socket_path, True)

    def client(self, token: str, transports: Sequence[str], nixl: NixlAgent | None) -> KvClient:
        return device_client(self.geometry, self.device_pool, self.nccl, self.rows, token, transports, nixl)

    def serve(self, worker_id: WorkerId, epoch: Epoch) -> None:
        read_only = reopen_read_only(self._staging_fd)
        staged = PoolInfo(worker_id, epoch, self._staging)
        self._servers.append(DescriptorServer(Path(self._socket_path), staged, read_only))
        if self._device_fd >= 0:
            info = PoolInfo(worker_id, epoch, self.geometry)
            fd, self._device_fd = self._device_fd, -1
            self._servers.append(DescriptorServer(Path(self._cuda_socket_path), info, fd, holds=True))

    def close(self) -> None:
        for server in self._servers:
            server.close()
        os.close(self._staging_fd)
        if self._device_fd >= 0:
            os.close(self._device_fd)


def _shared_blocks(geometry: PoolGeometry) -> tuple[int, mmap.mmap, Blocks]:
    """Host memory for blocks: its descriptor and mapping, and uint8 [num_blocks, block_bytes]. Raises ConfigError."""
    fd = create_memfd("mini-infer-kv", geometry.pool_bytes)
    mapping = map_fd(fd, geometry.pool_bytes, writable=True)
    return fd, mapping, blocks_over(mapping, geometry.num_blocks, geometry.block_bytes)


def device_client(
    geometry: PoolGeometry, device_pool: DevicePool, nccl: NcclPool | None, rows: HostRows, token: str,
    transports: Sequence[str], nixl: NixlAgent | None,
) -> KvClient:  # fmt: skip
    """A client that fills a pool in GPU memory, from host memory through `rows`."""
    leases = LeaseClient(token)
    made: list[Transport] = [CudaIpcTransport(device_pool)] if "cuda_ipc" in transports else []
    if nccl is not None and "nccl" in transports:
        made.append(NcclTransport(nccl, token))
    through_host = host_transports(rows.blocks, leases, transports, nixl)
    for staged in (StagedTransport(each, rows, device_pool) for each in through_host):
        made.append(MappedRowsTransport(staged, leases, device_pool) if staged.name == "shm" else staged)
    return KvClient(geometry, made, leases)
