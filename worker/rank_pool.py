"""Pools of ranks in other processes, which this one hands to peers, reads and fills."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from engine.gpu.device_memory import pool_over_device
from engine.gpu.pinning import pin
from engine.kv.memory import host_buffer_over
from kvstore.layout import PoolGeometry
from kvstore.transport import cuda_memory
from kvstore.transport.client import Blocks, KvClient, Transport, host_client, host_transports
from kvstore.transport.cuda_ipc import CudaIpcTransport
from kvstore.transport.descriptor_server import DescriptorServer
from kvstore.transport.handle import ShardAddress
from kvstore.transport.lease_client import LeaseClient
from kvstore.transport.nccl import NcclTransport
from kvstore.transport.nixl_agent import NixlAgent
from kvstore.transport.pool_info import PoolInfo
from kvstore.transport.shared_memory import blocks_over, create_memfd, map_fd, reopen_read_only
from kvstore.types import Epoch, WorkerId
from worker.device_pool import DevicePool
from worker.kv_exporter import HostRows
from worker.mapped_rows import MappedRowsTransport
from worker.nccl_pool import NcclPool, open_nccl
from worker.pinned_staging import StagedTransport


class RankPool(Protocol):
    """The pool of one rank."""

    geometry: PoolGeometry

    def address(self, kv_address: str) -> ShardAddress:
        """Address at which peers can read it; `kv_address` is the front's."""
        ...

    @property
    def host_blocks(self) -> Blocks:
        """What peers read of host memory: the pool, or the rows in front of it."""
        ...

    def client(self, token: str, transports: Sequence[str], nixl: NixlAgent | None) -> KvClient:
        """A reader of peers' blocks into this pool, by those of `transports` (best first) that it has."""
        ...

    def serve(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Start handing out descriptors. Raises ConfigError when a socket cannot be made."""
        ...

    def close(self) -> None: ...


class HostRankPool:
    """A rank's pool on a CPU, allocated by this process. blocks: uint8 [num_blocks, block_bytes]; fd: of the same."""

    def __init__(self, geometry: PoolGeometry, socket_path: str) -> None:
        """Raise ConfigError when the memory is not available."""
        self.geometry = geometry
        self.fd = create_memfd("mini-infer-kv", geometry.pool_bytes)
        mapping = map_fd(self.fd, geometry.pool_bytes, writable=True)
        self.blocks: Blocks = blocks_over(mapping, geometry.num_blocks, geometry.block_bytes)
        self._socket_path = socket_path
        self._server: DescriptorServer | None = None

    def address(self, kv_address: str) -> ShardAddress:
        return ShardAddress(kv_address, self._socket_path)

    @property
    def host_blocks(self) -> Blocks:
        return self.blocks

    def client(self, token: str, transports: Sequence[str], nixl: NixlAgent | None) -> KvClient:
        return host_client(self.geometry, self.blocks, token, transports, nixl)

    def serve(self, worker_id: WorkerId, epoch: Epoch) -> None:
        info = PoolInfo(worker_id, epoch, self.geometry)
        self._server = DescriptorServer(Path(self._socket_path), info, reopen_read_only(self.fd))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        os.close(self.fd)


class DeviceRankPool:
    """A rank's pool on another GPU, allocated by the rank, with staging rows in shared host memory."""

    def __init__(
        self, geometry: PoolGeometry, device: torch.device, fd: int, socket_path: str, staging: PoolGeometry,
        beside: HostRows, with_nccl: bool,
    ) -> None:  # fmt: skip
        """fd: of the device memory, taken over. staging: of as many rows as `beside`, rank 0's, has."""
        self.geometry = geometry
        memory = cuda_memory.attach(device.index or 0, fd, geometry.pool_bytes, writable=True)
        self.device_pool = DevicePool(pool_over_device(memory, geometry, device))
        self.nccl = open_nccl(self.device_pool) if with_nccl else None
        self._device_fd = fd
        self._staging = staging
        self._staging_fd = create_memfd("mini-infer-kv", staging.pool_bytes)
        mapping = map_fd(self._staging_fd, staging.pool_bytes, writable=True)
        blocks = blocks_over(mapping, staging.num_blocks, staging.block_bytes)
        host = host_buffer_over(mapping, *blocks.shape)
        pin(host)
        self.rows = HostRows(blocks, host, beside)
        self._socket_path = socket_path
        self._cuda_socket_path = str(Path(socket_path).with_suffix(".cuda.sock"))
        self._servers: list[DescriptorServer] = []

    def address(self, kv_address: str) -> ShardAddress:
        return ShardAddress(kv_address, self._socket_path, self._cuda_socket_path, True)

    @property
    def host_blocks(self) -> Blocks:
        return self.rows.blocks

    def client(self, token: str, transports: Sequence[str], nixl: NixlAgent | None) -> KvClient:
        return device_client(self.geometry, self.device_pool, self.nccl, self.rows, token, transports, nixl)

    def serve(self, worker_id: WorkerId, epoch: Epoch) -> None:
        read_only = reopen_read_only(self._staging_fd)
        staged = PoolInfo(worker_id, epoch, self._staging)
        self._servers.append(DescriptorServer(Path(self._socket_path), staged, read_only))
        info = PoolInfo(worker_id, epoch, self.geometry)
        self._servers.append(DescriptorServer(Path(self._cuda_socket_path), info, self._device_fd, holds=True))

    def close(self) -> None:
        for server in self._servers:
            server.close()
        os.close(self._staging_fd)


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
