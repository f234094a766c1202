"""Reads a peer's lease through its KvTransfer service: works everywhere, costs both sides copies.

The stream carries chunks in order, block after block; anything else in it is an error, and nothing is written
outside the local blocks that were named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc
import numpy as np
import numpy.typing as npt

from common.errors import TransferError
from kvstore.transport.handle import PeerShard
from kvstore.transport.host_pull import BlockPull, pull_parts
from kvstore.transport.lease_client import LeaseClient, rpc_failure
from protos import kvstore_pb2

Blocks = npt.NDArray[np.uint8]


class TcpTransport:
    """Streams over the channels of a `LeaseClient`, which stays the caller's to close."""

    name = "tcp"

    def __init__(self, pool: Blocks, client: LeaseClient) -> None:
        """`pool` is what is pulled into."""
        self._pool = pool
        self._client = client

    def offered_by(self, shard: PeerShard) -> bool:
        return bool(shard.address.kv_address)

    def open(self, shard: PeerShard) -> None:
        """Do nothing: the service checks lease and epoch with every read."""

    def pull(self, pull: BlockPull) -> list[list[int]]:
        return pull_parts(self._read, pull, self._pool)

    def _read(
        self, shard: PeerShard, positions: Sequence[int], blocks: Blocks, rows: Sequence[int], deadline_seconds: float
    ) -> None:
        if not positions:
            return
        stub = self._client.stub(shard.address.kv_address)
        request = kvstore_pb2.ReadRequest(
            lease_id=shard.lease_id, epoch=shard.epoch, positions=positions, rank=shard.rank
        )
        stream = stub.Read(request, timeout=deadline_seconds, metadata=self._client.metadata)
        try:
            receive_blocks(stream, rows, blocks)
        except grpc.RpcError as error:
            failure = rpc_failure(error)
            raise TransferError(str(failure)) from error
        finally:
            stream.cancel()

    def close(self) -> None:
        """Do nothing: the channels belong to the `LeaseClient`."""


def receive_blocks(chunks: Iterable[kvstore_pb2.BlockChunk], rows: Sequence[int], blocks: Blocks) -> None:
    """Write a stream of chunks to the rows `rows`. Raises TransferError unless it is exactly those."""
    block_bytes = blocks.shape[1]
    index = offset = 0
    for chunk in chunks:
        data = np.frombuffer(chunk.data, dtype=np.uint8)
        fits = index < len(rows) and 0 < data.size <= block_bytes - offset
        if not fits or (chunk.position, chunk.offset) != (index, offset):
            raise TransferError("the peer sent other data than was asked for")
        blocks[rows[index], offset : offset + data.size] = data
        offset += data.size
        if offset == block_bytes:
            index, offset = index + 1, 0
    if index != len(rows):
        raise TransferError(f"the peer sent {index} of {len(rows)} blocks")
