"""Reads a peer's host memory with NIXL: one-sided, over RDMA or TCP, or within a host.

Bytes arrive in a registered buffer of this process and are copied to their blocks, while the next piece arrives in
the buffer's other half. So a transfer that fails late, because a peer was stopped and resumed, writes to no block
that has another owner by then: its buffer is not reused until NIXL says that the transfer has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.errors import TransferError
from kvstore.handle.handle import PeerShard
from kvstore.pool.digest import digest_blocks
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.nixl.agent import NixlAgent, NixlRead, RemoteAgent, Span, agent_name
from kvstore.transports.shm import rows_of_lease
from kvstore.transports.transport import BlockPull, Blocks, LocalPool, Reader, SourcePart, Transport
from kvstore.types import Epoch, WorkerId, runs_of
from protos import kvstore_pb2

NAME = "nixl"
PIECE_BYTES = 16 << 20
NUM_HALVES = 2
MAX_PEERS = 64
TRANSFER_SECONDS = 2.0  # for a piece, plus the time for its bytes at the lowest useful speed
MIN_BYTES_PER_SECOND = 20e6


@dataclass(slots=True)
class _Buffer:
    """Registered memory, used by one pull at a time."""

    memory: npt.NDArray[np.uint8]  # (NUM_HALVES, PIECE_BYTES or one block)
    reads: list[NixlRead] = field(default_factory=list)  # of a failed pull: they may still write

    def is_free(self) -> bool:
        if not all(read.has_ended() for read in self.reads):
            return False
        for read in self.reads:
            read.release()
        self.reads.clear()
        return True


class NixlReader:
    """Agents of peers by worker, and as many buffers as there have been concurrent pulls."""

    def __init__(self, pool: Blocks, leases: LeaseClient, agent: NixlAgent) -> None:
        """pool: the target of pulls. The caller closes `leases` and `agent`."""
        self._pool = pool
        self._leases = leases
        self._agent = agent
        self._lock = threading.Lock()
        self._peers: dict[WorkerId, tuple[Epoch, RemoteAgent]] = {}
        self._buffers: list[_Buffer] = []

    def pull(self, pull: BlockPull) -> list[list[int]]:
        digests: list[list[int]] = []
        for part in pull.parts:
            with self._connected(part.shard) as peer:
                digests.append(self._pull_part(part, peer, pull) if pull.positions else [])
        return digests

    def close(self) -> None:
        """Forget all peers. Transfers in progress end without help."""
        with self._lock:
            peers = [peer for _, peer in self._peers.values()]
            self._peers.clear()
        for peer in peers:
            self._agent.disconnect(peer)

    def _pull_part(self, part: SourcePart, peer: RemoteAgent, pull: BlockPull) -> list[int]:
        shard = part.shard
        try:
            memory = peer.pools[shard.rank]
        except IndexError:
            raise TransferError("the peer has not as many ranks as its KV handle says") from None
        block_bytes = shard.geometry.block_bytes
        if memory.row_bytes != block_bytes:
            raise TransferError("the peer's memory holds other blocks than the KV handle describes")
        rows = rows_of_lease(shard, pull.positions, memory.num_rows, self._leases, pull.seconds_left)
        most = max(PIECE_BYTES // block_bytes, 1)
        buffer = self._take_buffer(max(PIECE_BYTES, block_bytes))
        firsts = range(0, len(rows), most)
        digests: list[int] = []

        def start(index: int) -> None:
            if index < len(firsts):
                some = rows[firsts[index] : firsts[index] + most]
                half = buffer.memory[index % NUM_HALVES].ctypes.data
                runs = list(runs_of(some))
                remote = [memory.span(row, count) for _, row, count in runs]
                local: list[Span] = [(half + place * block_bytes, count * block_bytes) for place, _, count in runs]
                buffer.reads.append(self._agent.read(peer, remote, local))

        try:
            start(0)
            for index, first in enumerate(firsts):
                start(index + 1)
                count = min(most, len(rows) - first)
                seconds = TRANSFER_SECONDS + count * block_bytes / MIN_BYTES_PER_SECOND
                buffer.reads[0].wait(min(time.monotonic() + seconds, pull.deadline))
                buffer.reads.pop(0).release()
                blocks = buffer.memory[index % NUM_HALVES, : count * block_bytes].reshape(count, block_bytes)
                digests += digest_blocks(blocks)
                targets = pull.local_block_ids[first : first + count]
                part.put(blocks, self._pool, targets)
        finally:
            with self._lock:
                self._buffers.append(buffer)
        return digests

    @contextmanager
    def _connected(self, shard: PeerShard) -> Iterator[RemoteAgent]:
        """Yield the agent of the peer's current life, which NIXL keeps until the end of the block, whatever others
        do.

        Raises TransferError, UnavailableError, HandshakeError. After a TransferError in the block, the next user
        reconnects.
        """
        with self._lock:
            epoch, known = self._peers.get(shard.worker_id, (None, None))
            if epoch != shard.epoch:
                known = None  # of an earlier life
            if known is not None:
                self._agent.share(known)
        peer = known or self._connect(shard)
        try:
            yield peer
        except TransferError:
            with self._lock:
                if self._peers.get(shard.worker_id) == (shard.epoch, peer):
                    self._drop(shard.worker_id)
            raise
        finally:
            self._agent.disconnect(peer)

    def _connect(self, shard: PeerShard) -> RemoteAgent:
        """Connect to the peer, and also keep it for later."""
        request = kvstore_pb2.DescribeTransportRequest(epoch=shard.epoch, transport=NAME)
        reply = self._leases.call(shard.address.kv_address, "DescribeTransport", request)
        peer = self._agent.connect(reply.description)
        if peer.name != shard.address_for(NAME):
            self._agent.disconnect(peer)
            raise TransferError("the address is another worker's, or this one has restarted (stale epoch)")
        with self._lock:
            if shard.worker_id in self._peers:
                self._drop(shard.worker_id)
            elif len(self._peers) >= MAX_PEERS:
                self._drop(next(iter(self._peers)))  # the oldest
            self._agent.share(peer)
            self._peers[shard.worker_id] = (shard.epoch, peer)
        return peer

    def _drop(self, worker_id: WorkerId) -> None:
        """Stop keeping a peer; NIXL forgets it after its last pull. Call with the lock held."""
        self._agent.disconnect(self._peers.pop(worker_id)[1])

    def _take_buffer(self, half_bytes: int) -> _Buffer:
        """Return a buffer without transfers in progress. Raises ConfigError if no memory can be registered."""
        with self._lock:
            for index, buffer in enumerate(self._buffers):
                if buffer.memory.shape[1] >= half_bytes and buffer.is_free():
                    return self._buffers.pop(index)
        memory = np.empty((NUM_HALVES, half_bytes), dtype=np.uint8)
        self._agent.register(memory)
        return _Buffer(memory)


class NixlTransport(Transport):
    """An address is the name of the agent that has registered the pool, or the staging rows in front of it.

    An idle agent costs a twentieth of a core, so it only exists if this transport is named.
    """

    name = NAME
    offered = "named"
    _agent: NixlAgent | None = None

    def reader(self, pool: LocalPool, leases: LeaseClient) -> Reader:
        return pool.through_host(NixlReader(pool.host_blocks, leases, self._agent_of(pool)))

    def export(self, pool: LocalPool) -> bytes:
        agent = self._agent_of(pool)
        agent.offer(pool.host_blocks)
        return agent.name.encode()

    def describe(self) -> bytes:
        return b"" if self._agent is None else self._agent.describe()

    def _agent_of(self, pool: LocalPool) -> NixlAgent:
        """Return the agent of this worker's life. Raises ConfigError without the package."""
        if self._agent is None:
            self._agent = NixlAgent(agent_name(pool.info.worker_id, pool.info.epoch))
        return self._agent
