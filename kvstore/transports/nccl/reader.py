"""Pulls from a peer's pool in GPU memory through NCCL, with one communicator per pair of pools, kept until it fails.

Two-sided. Over the pair's own TCP connection, the reader names a lease and positions in it; the owner's engine
process (`server.py`) checks them and sends the blocks. The end of the connection ends the communicator. The
`NcclDevice` sends and receives bytes; this module knows no CUDA.

    reader: [token, worker, epoch, rank, GPU]   owner: [error]      then the communicator's unique id, and both join
    reader: [lease, positions, pieces]          owner: [error]      then one message per piece; repeatedly

An empty error means acceptance. `pieces` are numbers of blocks, in the order of `positions`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import TransferError, UnavailableError
from kvstore.handle.handle import PeerShard, PoolName
from kvstore.layout import HeadCopy
from kvstore.transports.nccl.connection import REPLY_SECONDS, Connection, RefusedError
from kvstore.transports.transport import BlockPull, SourcePart
from kvstore.types import BlockId, Epoch

logger = logging.getLogger(__name__)
NAME = "nccl"
OWNER, READER = 0, 1  # ranks in a communicator
JOIN_SECONDS = 10.0  # NCCL inspects the machine, loads kernels, connects: 1 to 3 s
RETRY_SECONDS = 10.0  # before the next attempt to connect to a peer after a failure
TRANSFER_SECONDS = 2.0  # plus the time for the bytes at the lowest useful speed
MIN_BYTES_PER_SECOND = 1e9


class Link(Protocol):
    """One end of a communicator. Used by one thread at a time, and not after `abort`."""

    def abort(self) -> None:
        """End it, with its pending work on the device, in a separate thread: the caller does not wait."""
        ...


class NcclDevice(Protocol):
    """The local pool, its device, and NCCL there. Calls end by their deadline (time.monotonic)."""

    gpu: str  # UUID

    def unique_id(self) -> bytes:
        """Return a name for a new communicator. Raises TransferError."""
        ...

    def connect(self, unique_id: bytes, rank: int, deadline: float) -> Link:
        """Join a communicator, and test it with a message from owner to reader. Raises TransferError."""
        ...

    def piece_lengths(self, num_blocks: int, block_bytes: int) -> list[int]:
        """Divide `num_blocks` of a peer's pool into messages."""
        ...

    def prepare(self, block_bytes: int, copy: HeadCopy | None, deadline: float) -> None:
        """Prepare to receive such blocks, so that the owner, who has a deadline, need not wait.

        Waits until no step in flight may write to blocks that were given to loads. Raises TransferError.
        """
        ...

    def receive(
        self, link: Link, pieces: Sequence[int], block_bytes: int, local_ids: Sequence[BlockId],
        copy: HeadCopy | None, deadline: float, check: Callable[[], None],
    ) -> list[int]:  # fmt: skip
        """Receive blocks of `block_bytes`, copy them, or heads of them, to local blocks; return their digests.

        `check` is called while waiting, and raises TransferError if the peer is gone. Raises TransferError, after
        which nothing is written to the local blocks.
        """
        ...

    def send(
        self, link: Link, block_ids: Sequence[BlockId], pieces: Sequence[int], deadline: float,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        """Send blocks, and wait until they have been received. Raises TransferError."""
        ...


def transfer_deadline(num_bytes: int) -> float:
    """Return the deadline of a transfer that starts now: a kernel that waits for a peer delays memory calls of
    others."""
    return time.monotonic() + TRANSFER_SECONDS + num_bytes / MIN_BYTES_PER_SECOND


@dataclass(slots=True)
class _Pair:
    """The communicator with one peer's pool, if any. Its user holds `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    epoch: Epoch | None = None
    connection: Connection | None = None
    link: Link | None = None
    retry_time: float = 0.0  # of this epoch

    def end(self) -> None:
        link, connection = self.link, self.connection
        self.link = self.connection = None
        if link is not None:
            link.abort()
        if connection is not None:
            connection.close()


class NcclReader:
    """Communicators with peers' pools by worker and rank."""

    def __init__(self, device: NcclDevice, token: str = "") -> None:
        self._device = device
        self._token = token
        self._lock = threading.Lock()
        self._pairs: dict[PoolName, _Pair] = {}

    def pull(self, pull: BlockPull) -> list[list[int]]:
        return [self._pull_part(part, pull) if pull.positions else [] for part in pull.parts]

    def close(self) -> None:
        with self._lock:
            pairs = list(self._pairs.values())
            self._pairs.clear()
        for pair in pairs:
            with contextlib.suppress(TransferError), _held(pair, time.monotonic() + TRANSFER_SECONDS):
                pair.end()

    def _pull_part(self, part: SourcePart, pull: BlockPull) -> list[int]:
        shard, pair = part.shard, self._pair(part.shard)
        if shard.address_for(NAME).partition(" ")[2] == self._device.gpu:
            raise UnavailableError("NCCL does not connect a GPU with itself")
        block_bytes = shard.geometry.block_bytes
        pieces = self._device.piece_lengths(len(pull.positions), block_bytes)
        with _held(pair, min(time.monotonic() + JOIN_SECONDS, pull.deadline)):
            connection, link = self._connected(pair, shard)
            self._device.prepare(block_bytes, part.copy, pull.deadline)
            deadline = min(transfer_deadline(len(pull.positions) * block_bytes), pull.deadline)
            try:
                connection.ask([shard.lease_id, list(pull.positions), pieces])
                return self._device.receive(
                    link, pieces, block_bytes, pull.local_block_ids, part.copy, deadline, connection.check
                )
            except RefusedError:
                raise
            except BaseException:  # whatever it is, messages may be in flight: the next pull reconnects
                pair.end()
                raise

    def _pair(self, shard: PeerShard) -> _Pair:
        with self._lock:
            return self._pairs.setdefault(shard.pool_name, _Pair())

    def _connected(self, pair: _Pair, shard: PeerShard) -> tuple[Connection, Link]:
        """Return the pair's communicator, or a new one if it has ended. Raises TransferError, UnavailableError."""
        if pair.connection is not None and pair.epoch == shard.epoch:
            try:
                pair.connection.check()
            except TransferError:
                pair.end()
        if pair.connection is None or pair.link is None or pair.epoch != shard.epoch:
            if pair.epoch == shard.epoch and time.monotonic() < pair.retry_time:
                raise UnavailableError("the peer could not be reached a moment ago")
            pair.end()
            self._end_lost_pairs()
            pair.epoch, pair.retry_time = shard.epoch, time.monotonic() + RETRY_SECONDS
            pair.connection, pair.link = self._connect(shard)
            pair.retry_time = 0.0
        return pair.connection, pair.link

    def _connect(self, shard: PeerShard) -> tuple[Connection, Link]:
        port = shard.address_for(NAME).partition(" ")[0]
        if not port.isdecimal() or len(port) > 5 or int(port) > 65535:
            raise TransferError("the KV handle names no port for NCCL")
        host = shard.address.kv_address.rpartition(":")[0].strip("[]")
        try:
            sock = socket.create_connection((host, int(port)), REPLY_SECONDS)
        except OSError as error:
            raise UnavailableError(f"the peer cannot be reached: {error.strerror or error}") from error
        connection = Connection(sock)
        try:
            connection.ask([self._token, shard.worker_id, shard.epoch, shard.rank, self._device.gpu])
            unique_id = self._device.unique_id()
            connection.send(unique_id)
            return connection, self._device.connect(unique_id, READER, time.monotonic() + JOIN_SECONDS)
        except BaseException:  # Ctrl-C and cancelled tasks, too: nothing may stay open
            connection.close()
            raise

    def _end_lost_pairs(self) -> None:
        """End communicators whose owners are gone, since they hold memory of this GPU."""
        with self._lock:
            pairs = list(self._pairs.items())
        for name, pair in pairs:
            if pair.connection is None or not pair.lock.acquire(blocking=False):
                continue
            try:
                if pair.connection is not None:
                    pair.connection.check()
            except TransferError:
                logger.info("worker %s is gone: its communicator is ended", name[0])
                pair.end()
            finally:
                pair.lock.release()


@contextlib.contextmanager
def _held(pair: _Pair, deadline: float) -> Iterator[None]:
    """Hold the pair's lock. Raises TransferError if others hold it until the deadline."""
    if not pair.lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
        raise TransferError("other pulls from the peer take too long")
    try:
        yield
    finally:
        pair.lock.release()
