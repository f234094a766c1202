"""A transport known only to a table: blocks of a lease, verified by digests, from worker to worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.errors import TransferError, UnavailableError
from kvstore.handle.handle import HandleWriter, open_handle
from kvstore.pool.block_pool import BlockPool
from kvstore.types import BlockId
from protos import types_pb2 as pb
from tests.kvstore.helpers import GEOMETRY, with_address
from worker.config import TRANSPORTS, WorkerConfig
from worker.kv.shared_pool import SharedPoolMemory

FILE = {"file": "tests.kvstore.transports.file_transport:FileTransport"}


class Worker:
    """Memory and leases of a worker, as in its engine process."""

    def __init__(self, folder: Path, name: str, seed: int) -> None:
        self.memory = SharedPoolMemory(WorkerConfig(worker_id=name, run_dir=str(folder), kv_transport="file"))
        self.memory.allocate_for_rank(GEOMETRY)
        self.blocks = self.memory.ranks[0].host_blocks
        self.blocks[:] = np.random.default_rng(seed).integers(0, 256, self.blocks.shape, dtype=np.uint8)
        pool = BlockPool(GEOMETRY.num_blocks)
        handles = HandleWriter(name, self.memory.serve("127.0.0.1:1"), 60.0)
        self.block_ids = pool.allocate(3)
        self._leases = self.memory.open_leases(pool.release, handles)

    def handle(self) -> pb.KvHandle:
        return self._leases.grant(self.block_ids, self._leases.digests(self.block_ids), 12, time.monotonic())[1]

    def close(self) -> None:
        self.memory.clients[0].close()
        self.memory.close()


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    for name, path in FILE.items():
        monkeypatch.setitem(TRANSPORTS, name, path)
    both = [Worker(tmp_path, "owner", 1), Worker(tmp_path, "reader", 2)]
    yield both
    for worker in both:
        worker.close()


def test_blocks_travel_by_a_transport_of_one_file_and_one_line(workers: list[Worker]) -> None:
    owner, reader = workers
    lease = open_handle(owner.handle())
    assert {"shm", "file"} <= set(lease.shards[0].address.transports)
    [client] = reader.memory.clients
    assert client.pull(lease, [0, 2], [BlockId(5), BlockId(1)]) == "file"
    wanted = owner.blocks[[owner.block_ids[0], owner.block_ids[2]]]
    np.testing.assert_array_equal(reader.blocks[[5, 1]], wanted)
    with pytest.raises(UnavailableError, match="no transport in common"):
        client.pull(with_address(lease, file=None), [0], [BlockId(0)])


def test_what_it_brings_is_verified(workers: list[Worker]) -> None:
    owner, reader = workers
    lease = open_handle(owner.handle())
    owner.blocks[owner.block_ids[1]] += 1  # overwritten since the lease was granted
    with pytest.raises(TransferError, match="block 1 of worker owner did not arrive intact"):
        reader.memory.clients[0].pull(lease, [1], [BlockId(5)])
