"""Reads a peer's lease through its KvTransfer service: works everywhere, costs both sides copies.

The stream carries chunks in order, block after block; anything else in it is an error, and nothing is written
outside the local blocks that were named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import grpc
import numpy as np
import numpy.typing as npt

from common.errors import TransferError
from kvstore.layout import PoolGeometry
from kvstore.transport import pool_info
from kvstore.transport.lease_client import CALL_SECONDS, LeaseClient, call, rpc_failure
from kvstore.transport.pool_info import check_compatible
from kvstore.types import BlockId, Epoch, PeerPool
from protos import kvstore_pb2, types_pb2

MAX_KNOWN_PEERS = 1024
Blocks = npt.NDArray[np.uint8]


class TcpTransport:
    """Streams over the channels of a `LeaseClient`, which stays the caller's to close."""

    name = "tcp"

    def __init__(
        self, geometry: PoolGeometry, pool: Blocks, client: LeaseClient, digest: Callable[[Blocks], list[int]]
    ) -> None:
        """`pool` is what is pulled into."""
        self._geometry = geometry
        self._pool = pool
        self._client = client
        self._digest = digest
        self._lock = threading.Lock()
        self._known: set[tuple[str, Epoch]] = set()  # handshakes that were fine

    def offered_by(self, peer: PeerPool) -> bool:
        return bool(peer.kv_address)

    def open(self, peer: PeerPool) -> None:
        with self._lock:
            if (peer.kv_address, peer.epoch) in self._known:
                return
        stub = self._client.stub(peer.kv_address)
        reply: kvstore_pb2.PoolInfo = call(
            lambda: stub.Describe(types_pb2.DescribeRequest(), timeout=CALL_SECONDS, metadata=self._client.metadata)
        )
        info = pool_info.from_proto(reply)
        if info.epoch != peer.epoch:
            raise TransferError("the KV blocks belong to an earlier life of the worker (stale epoch)")
        check_compatible(self._geometry, info)
        with self._lock:
            if len(self._known) >= MAX_KNOWN_PEERS:
                self._known.clear()
            self._known.add((peer.kv_address, peer.epoch))

    def pull(
        self,
        peer: PeerPool,
        positions: Sequence[int],
        local_block_ids: Sequence[BlockId],
        deadline_seconds: float,
    ) -> list[int]:
        if not positions:
            return []
        stub = self._client.stub(peer.kv_address)
        request = kvstore_pb2.ReadRequest(lease_id=peer.lease_id, epoch=peer.epoch, positions=positions)
        stream = stub.Read(request, timeout=deadline_seconds, metadata=self._client.metadata)
        try:
            receive_blocks(stream, local_block_ids, self._pool)
        except grpc.RpcError as error:
            failure = rpc_failure(error)
            raise TransferError(str(failure)) from error
        finally:
            stream.cancel()
        return [self._digest(self._pool[block_id : block_id + 1])[0] for block_id in local_block_ids]

    def close(self) -> None:
        with self._lock:
            self._known.clear()


def receive_blocks(
    chunks: Iterable[kvstore_pb2.BlockChunk], local_block_ids: Sequence[BlockId], local_pool: Blocks
) -> None:
    """Write a stream of chunks to the rows `local_block_ids`. Raises TransferError unless it is exactly those."""
    block_bytes = local_pool.shape[1]
    index = offset = 0
    for chunk in chunks:
        data = np.frombuffer(chunk.data, dtype=np.uint8)
        fits = index < len(local_block_ids) and 0 < data.size <= block_bytes - offset
        if not fits or (chunk.position, chunk.offset) != (index, offset):
            raise TransferError("the peer sent other data than was asked for")
        local_pool[local_block_ids[index], offset : offset + data.size] = data
        offset += data.size
        if offset == block_bytes:
            index, offset = index + 1, 0
    if index != len(local_block_ids):
        raise TransferError(f"the peer sent {index} of {len(local_block_ids)} blocks")
