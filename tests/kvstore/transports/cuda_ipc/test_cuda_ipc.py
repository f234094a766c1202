"""Mappings of peers' GPU memory: by peer and epoch, and their lifetime. The device here maps host memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from common.errors import HandshakeError, MiniInferError, TransferError
from kvstore.handle.handle import PeerLease
from kvstore.layout import HeadCopy
from kvstore.pool.digest import digest_blocks
from kvstore.transports.client import KvClient
from kvstore.transports.cuda_ipc.held_server import HeldServer
from kvstore.transports.cuda_ipc.reader import CudaIpcReader, RemotePool
from kvstore.transports.fallbacks.client import FallbackClient
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.shared_memory import blocks_over, map_fd, reopen_read_only
from kvstore.transports.shm import ShmReader
from kvstore.types import BlockId, Epoch
from tests.harness.waiting import wait_until
from tests.kvstore.helpers import GEOMETRY, OTHER_DTYPE, Owner, empty_pool, ids, pull_of_one, with_address, with_shard


class GpuOwner(Owner):
    """A pool that is handed out twice: as if it were in GPU memory, and by shared memory."""

    def __init__(self, folder: Path, name: str = "owner", seed: int = 0) -> None:
        super().__init__(folder, name=name, seed=seed)
        self.cuda_socket = folder / f"{name}.cuda.sock"
        self.cuda_server = HeldServer(self.cuda_socket, self.info, reopen_read_only(self.fd))

    def device_peer(self, block_ids: Sequence[int]) -> PeerLease:
        return with_address(self.peer(block_ids), cuda_ipc=self.cuda_socket)

    def close(self) -> None:
        self.cuda_server.close()
        super().close()


class Mapped:
    def __init__(self, fd: int, num_blocks: int) -> None:
        self.blocks = blocks_over(
            map_fd(fd, num_blocks * GEOMETRY.block_bytes, False), num_blocks, GEOMETRY.block_bytes
        )
        self.is_open = True

    def close(self) -> None:
        assert self.is_open, "closed twice"
        self.is_open = False
        del self.blocks


class HostDevice:
    """Copies with numpy; `during_pull` runs inside a pull."""

    def __init__(self) -> None:
        self.pool = empty_pool()
        self.attached: list[Mapped] = []
        self.out_of_reach = False
        self.during_pull: Callable[[], None] = lambda: None

    def attach(self, fd: int, num_blocks: int, block_bytes: int) -> Mapped:
        assert block_bytes == GEOMETRY.block_bytes
        if self.out_of_reach:
            raise TransferError("GPU 0 cannot map the peer's memory")
        self.attached.append(Mapped(fd, num_blocks))
        return self.attached[-1]

    def pull(
        self, remote: RemotePool, remote_ids: Sequence[BlockId], local_ids: Sequence[BlockId],
        copy: HeadCopy | None = None,
    ) -> list[int]:  # fmt: skip
        assert isinstance(remote, Mapped)
        assert copy is None
        self.during_pull()
        assert remote.is_open, "unmapped while it is read"
        self.pool[list(local_ids)] = remote.blocks[list(remote_ids)]
        return digest_blocks(self.pool[list(local_ids)])

    @property
    def num_open(self) -> int:
        return sum(mapped.is_open for mapped in self.attached)


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


@pytest.fixture
def transport(device: HostDevice) -> Iterator[CudaIpcReader]:
    transport = CudaIpcReader(device)
    yield transport
    transport.close()
    assert device.num_open == 0


@pytest.fixture
def client(device: HostDevice, transport: CudaIpcReader) -> Iterator[KvClient]:
    leases = LeaseClient()
    client = FallbackClient(GEOMETRY, {"cuda_ipc": transport, "shm": ShmReader(device.pool, leases)})
    yield client
    client.close()


def test_shared_memory_takes_over_where_the_device_cannot_reach(
    tmp_path: Path, client: KvClient, device: HostDevice
) -> None:
    owner = GpuOwner(tmp_path)
    device.out_of_reach = True
    assert client.pull(owner.device_peer([3]), [0], ids(0)) == "shm"
    device.out_of_reach = False
    for cuda_socket in (None, "/nowhere/x.sock"):  # no such memory; another host
        peer = with_address(owner.device_peer([3]), cuda_ipc=cuda_socket)
        assert client.pull(peer, [0], ids(0)) == "shm"
    namesake = GpuOwner(tmp_path, "namesake")  # same path, another host
    peer = with_address(owner.device_peer([3]), cuda_ipc=namesake.cuda_socket)
    assert client.pull(peer, [0], ids(0)) == "shm"
    assert not device.attached
    namesake.close()
    owner.close()


def test_what_does_not_fit_is_refused(tmp_path: Path, transport: CudaIpcReader, device: HostDevice) -> None:
    owner = GpuOwner(tmp_path)
    with pytest.raises(HandshakeError, match="here"):
        KvClient(OTHER_DTYPE, {"cuda_ipc": transport}).pull(owner.device_peer([1]), [0], ids(0))
    with pytest.raises(TransferError, match="epoch"):
        transport.pull(pull_of_one(with_shard(owner.device_peer([1]), epoch=Epoch(5))))
    for number in (8, -1):
        lease = with_shard(owner.device_peer([1]), block_ids=tuple(ids(number)))
        with pytest.raises(TransferError, match="outside"):
            transport.pull(pull_of_one(lease))
    assert not device.pool.any()
    owner.close()


def test_a_mapping_ends_with_its_owner_and_its_memory_is_free_for_the_next(
    tmp_path: Path, transport: CudaIpcReader, device: HostDevice
) -> None:
    first = GpuOwner(tmp_path)
    peer = first.device_peer([1])
    transport.pull(pull_of_one(peer))
    first.close()  # what its connections show, and those of a process that was killed
    wait_until(lambda: len(transport._mappings) == 0)
    wait_until(lambda: device.num_open == 0)
    with pytest.raises(MiniInferError):
        transport.pull(pull_of_one(peer))
    reborn = GpuOwner(tmp_path, seed=1)
    transport.pull(pull_of_one(reborn.device_peer([2])))
    np.testing.assert_array_equal(device.pool[0], reborn.blocks[2])
    with pytest.raises(TransferError, match="epoch"):  # a handle of the first life
        transport.pull(pull_of_one(peer))
    assert len(transport._mappings) == device.num_open == 1
    reborn.close()


def test_an_owner_that_dies_during_a_pull_is_unmapped_after_it(
    tmp_path: Path, transport: CudaIpcReader, device: HostDevice
) -> None:
    owner = GpuOwner(tmp_path)
    peer = owner.device_peer([3])

    def die() -> None:
        owner.close()
        wait_until(lambda: len(transport._mappings) == 0)
        time.sleep(0.02)

    device.during_pull = die
    transport.pull(pull_of_one(peer))
    np.testing.assert_array_equal(device.pool[0], owner.blocks[3])
    wait_until(lambda: device.num_open == 0)


def test_two_threads_map_a_peer_once(tmp_path: Path, transport: CudaIpcReader, device: HostDevice) -> None:
    owner = GpuOwner(tmp_path)
    peer = owner.device_peer([3])
    together = threading.Barrier(4)

    def pull() -> None:
        together.wait()
        transport.pull(pull_of_one(peer))

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(transport._mappings) == device.num_open == 1
    np.testing.assert_array_equal(device.pool[0], owner.blocks[3])
    owner.close()


def test_the_owner_forgets_readers_that_have_gone(tmp_path: Path, device: HostDevice) -> None:
    owner = GpuOwner(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        transport = CudaIpcReader(device)
        transport.pull(pull_of_one(owner.device_peer([1])))
        transport.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)  # one that is held, one being closed
    owner.close()
