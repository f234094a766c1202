"""The caller's side of KvTransfer: one channel per peer, renewals and releases. Blocking, thread-safe."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import grpc

from common.errors import TransferError, UnavailableError
from common.net.rpc import CHANNEL_OPTIONS, token_metadata
from kvstore.handle.handle import PeerLease, PeerShard
from kvstore.types import BlockId
from protos import kvstore_pb2, kvstore_pb2_grpc

MAX_CHANNELS = 64
CALL_SECONDS = 5.0


class LeaseClient:
    """Channels to peers by address; the least recently used one is closed beyond MAX_CHANNELS."""

    def __init__(self, token: str = "") -> None:
        self._metadata = token_metadata(token)
        self._lock = threading.Lock()
        self._channels: OrderedDict[str, tuple[grpc.Channel, kvstore_pb2_grpc.KvTransferStub]] = OrderedDict()

    def renew(self, lease: PeerLease) -> bool:
        """Renew a lease; False when it has ended. Raises UnavailableError."""
        request = kvstore_pb2.LeaseRequest(
            lease_id=lease.lease_id, epoch=lease.epoch, lease_seconds=lease.lease_seconds
        )
        return bool(self.call(lease.kv_address, "Renew", request).held)

    def release(self, lease: PeerLease) -> bool:
        """Release a lease; False when there was none. Raises UnavailableError."""
        request = kvstore_pb2.LeaseRequest(lease_id=lease.lease_id, epoch=lease.epoch)
        return bool(self.call(lease.kv_address, "Release", request).held)

    def stage(self, shard: PeerShard, first: int, deadline_seconds: float) -> list[BlockId]:
        """Have the lease's blocks from position `first` on copied to the peer's shared memory; returns their rows.

        Raises UnavailableError, or TransferError when the peer cannot.
        """
        request = kvstore_pb2.StageRequest(lease_id=shard.lease_id, epoch=shard.epoch, rank=shard.rank, first=first)
        rows = self.call(shard.address.kv_address, "Stage", request, deadline_seconds).rows
        if len(rows) != len(shard.block_ids) - first:
            raise TransferError("the peer has staged another lease")
        return [BlockId(row) for row in rows]

    def describe(self, shard: PeerShard, transport: str) -> bytes:
        """What the peer's transport tells only those with the token. Raises UnavailableError, TransferError."""
        request = kvstore_pb2.DescribeTransportRequest(epoch=shard.epoch, transport=transport)
        return bytes(self.call(shard.address.kv_address, "DescribeTransport", request).description)

    def call(self, address: str, method: str, request: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a peer. Raises UnavailableError when it cannot be reached in time, else TransferError."""
        try:
            return getattr(self._stub(address), method)(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            status: grpc.StatusCode = error.code()
            if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise UnavailableError(f"the peer does not answer ({status.name})") from error
            raise TransferError(f"the peer refused: {error.details()} ({status.name})") from error

    def _stub(self, address: str) -> kvstore_pb2_grpc.KvTransferStub:
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

    def close(self) -> None:
        with self._lock:
            for channel, _ in self._channels.values():
                channel.close()
            self._channels.clear()
