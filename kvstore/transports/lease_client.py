"""The caller's side of KvTransfer: one channel per peer, renewals and releases. Blocking, thread-safe."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc

from common.errors import TransferError, UnavailableError
from common.net.rpc import CHANNEL_OPTIONS, token_metadata
from kvstore.handle.handle import PeerLease, PeerShard
from kvstore.types import BlockId
from protos import kvstore_pb2, kvstore_pb2_grpc

MAX_CHANNELS = 64
CALL_SECONDS = 5.0
T = TypeVar("T")


class LeaseClient:
    """Channels to peers by address; the least recently used one is closed beyond MAX_CHANNELS."""

    def __init__(self, token: str = "") -> None:
        self.metadata = token_metadata(token)
        self._lock = threading.Lock()
        self._channels: OrderedDict[str, tuple[grpc.Channel, kvstore_pb2_grpc.KvTransferStub]] = OrderedDict()

    def stub(self, address: str) -> kvstore_pb2_grpc.KvTransferStub:
        """The stub for `address`, connected when it is first used."""
        with self._lock:
            entry = self._channels.get(address)
            if entry is None:
                channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
                entry = self._channels[address] = (channel, kvstore_pb2_grpc.KvTransferStub(channel))
                if len(self._channels) > MAX_CHANNELS:
                    _, (oldest, _stub) = self._channels.popitem(last=False)
                    oldest.close()
            self._channels.move_to_end(address)
            return entry[1]

    def renew(self, lease: PeerLease) -> bool:
        """Renew a lease; False when it has ended. Raises UnavailableError."""
        stub = self.stub(lease.kv_address)
        request = kvstore_pb2.LeaseRequest(
            lease_id=lease.lease_id, epoch=lease.epoch, lease_seconds=lease.lease_seconds
        )
        return bool(call(lambda: stub.Renew(request, timeout=CALL_SECONDS, metadata=self.metadata)).held)

    def release(self, lease: PeerLease) -> bool:
        """Release a lease; False when there was none. Raises UnavailableError."""
        stub = self.stub(lease.kv_address)
        request = kvstore_pb2.LeaseRequest(lease_id=lease.lease_id, epoch=lease.epoch)
        return bool(call(lambda: stub.Release(request, timeout=CALL_SECONDS, metadata=self.metadata)).held)

    def stage(self, shard: PeerShard, first: int, deadline_seconds: float) -> list[BlockId]:
        """Have the lease's blocks from position `first` on copied to the peer's shared memory; returns their rows.

        Raises UnavailableError, or TransferError when the peer cannot.
        """
        stub = self.stub(shard.address.kv_address)
        request = kvstore_pb2.StageRequest(lease_id=shard.lease_id, epoch=shard.epoch, rank=shard.rank, first=first)
        rows = call(lambda: stub.Stage(request, timeout=deadline_seconds, metadata=self.metadata)).rows
        if len(rows) != len(shard.block_ids) - first:
            raise TransferError("the peer has staged another lease")
        return [BlockId(row) for row in rows]

    def read(self, shard: PeerShard, positions: Sequence[int], deadline_seconds: float) -> tuple[bytes, int]:
        """Ask for blocks of the lease: the ticket, and the port at which it is good.

        Raises UnavailableError, or TransferError when the peer refuses.
        """
        stub = self.stub(shard.address.kv_address)
        request = kvstore_pb2.ReadRequest(
            lease_id=shard.lease_id, epoch=shard.epoch, positions=positions, rank=shard.rank
        )
        reply = call(lambda: stub.Read(request, timeout=deadline_seconds, metadata=self.metadata))
        return reply.ticket, reply.port

    def describe(self, shard: PeerShard, transport: str) -> bytes:
        """What the peer's transport tells only those with the token. Raises UnavailableError, TransferError."""
        stub = self.stub(shard.address.kv_address)
        request = kvstore_pb2.DescribeTransportRequest(epoch=shard.epoch, transport=transport)
        reply = call(lambda: stub.DescribeTransport(request, timeout=CALL_SECONDS, metadata=self.metadata))
        return bytes(reply.description)

    def close(self) -> None:
        with self._lock:
            for channel, _ in self._channels.values():
                channel.close()
            self._channels.clear()


def call(do: Callable[[], T]) -> T:
    """Run an RPC. Raises UnavailableError when the peer cannot be reached in time, else TransferError."""
    try:
        return do()
    except grpc.RpcError as error:
        raise rpc_failure(error) from error


def rpc_failure(error: grpc.RpcError) -> UnavailableError | TransferError:
    """The exception that a failed RPC stands for."""
    status: grpc.StatusCode = error.code()
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return UnavailableError(f"the peer does not answer ({status.name})")
    return TransferError(f"the peer refused: {error.details()} ({status.name})")
