"""A transport of one file: readers write requests into a folder, and the owner a lease's blocks next to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import msgspec
import numpy as np

from common.errors import TransferError
from kvstore.handle.handle import PeerShard
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.transport import BlockPull, Blocks, LeaseHolder, LocalPool, Reader, Transport, pull_parts


class FileTransport(Transport):
    name = "file"
    offered = "named"
    _closing = False

    def reader(self, pool: LocalPool, leases: LeaseClient) -> Reader:
        return pool.through_host(FileReader(pool.host_blocks))

    def export(self, pool: LocalPool) -> bytes:
        self._pool, self._folder = pool, Path(pool.socket_path).with_suffix(".files")
        self._folder.mkdir()
        return str(self._folder).encode()

    def serve(self, leases: LeaseHolder) -> None:
        self._thread = threading.Thread(target=self._answer, args=[leases])
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def _answer(self, leases: LeaseHolder) -> None:
        while not self._closing:
            for question in self._folder.glob("*.question"):
                lease_id, positions = msgspec.msgpack.decode(question.read_bytes())
                blocks = self._pool.host_blocks[leases.hold(lease_id, self._pool.info.epoch, positions)]
                put(question.with_suffix(".blocks"), blocks.tobytes())
                leases.let_go(lease_id)
                question.unlink()
            time.sleep(0.002)


class FileReader:
    def __init__(self, pool: Blocks) -> None:
        self._pool = pool

    def pull(self, pull: BlockPull) -> list[list[int]]:
        return pull_parts(self._read, pull, self._pool)

    def close(self) -> None: ...

    def _read(
        self, shard: PeerShard, positions: Sequence[int], blocks: Blocks, rows: Sequence[int], deadline_seconds: float
    ) -> None:
        question = Path(shard.address_for("file"), f"{uuid4().hex}.question")
        put(question, msgspec.msgpack.encode([shard.lease_id, positions]))
        answer, deadline = question.with_suffix(".blocks"), time.monotonic() + deadline_seconds
        while not answer.exists():
            if time.monotonic() > deadline:
                raise TransferError("the owner has not written its blocks in time")
            time.sleep(0.002)
        blocks[list(rows)] = np.fromfile(answer, dtype=np.uint8).reshape(len(rows), -1)


def put(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)
