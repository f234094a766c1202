"""KV handles: what a worker needs to read a prompt's KV from another. The only file that knows a shard's bytes.

    writer:  HandleWriter.write(lease, ...) -> KvHandle, one shard of bytes per rank
    between: worker front, router and journal carry the handle unread; a lease is ended by its id and epoch
    reader:  open_handle(handle) -> PeerLease, checked

A shard is msgpack: [format, geometry, [kv address, needs staging, {transport: its address}], block ids, digests], ids
and digests as little-endian integers. What a transport's address says, only that transport knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast

import msgspec
import numpy as np

from common.errors import HandshakeError, TransferError
from kvstore.handle.pool_info import MAX_TEXT, PoolInfo, from_fields, geometry_from_wire, geometry_to_wire
from kvstore.layout import PoolGeometry, are_all_shards
from kvstore.pool.leases import Lease
from kvstore.types import BlockId, Epoch, LeaseId, WorkerId

PoolName = tuple[WorkerId, int]  # worker and rank
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Addresses = Annotated[Mapping[Text, Annotated[bytes, msgspec.Meta(max_length=1 << 16)]], msgspec.Meta(max_length=64)]
FORMAT = 4
MAX_SHARDS = 256
MAX_HANDLE_BLOCKS = 1 << 20
MAX_SHARD_BYTES = 16 << 20  # 12 a block, and room for the rest


@dataclass(frozen=True, slots=True)
class KvHandle:
    """Under which lease of which worker a prompt's KV waits, and one opaque shard per rank of that worker."""

    lease_id: LeaseId
    worker_id: WorkerId
    epoch: Epoch
    num_tokens: int  # whose KV the blocks hold
    lease_seconds: float
    shards: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """Where one rank's pool can be read."""

    kv_address: Text = ""  # host:port of the KvTransfer service
    needs_staging: bool = False  # the blocks lie in GPU memory: of host memory, rows that the owner names hold them
    transports: Addresses = field(default_factory=dict)  # by the name of each transport that is offered


@dataclass(frozen=True, slots=True)
class HandleShard:
    """The pool of one rank, as its owner's handles name it."""

    geometry: PoolGeometry
    address: ShardAddress


@dataclass(frozen=True, slots=True)
class PeerShard:
    """The blocks of a lease in the pool of one rank."""

    lease_id: LeaseId
    worker_id: WorkerId
    epoch: Epoch
    geometry: PoolGeometry
    address: ShardAddress
    block_ids: tuple[BlockId, ...]
    digests: tuple[int, ...]  # one per block
    rank: int = 0  # its index among the handle's shards, by which the owner knows the pool

    @property
    def pool_name(self) -> PoolName:
        return self.worker_id, self.rank

    def address_for(self, transport: str) -> str:
        """Address of the pool for a transport that is offered. Raises TransferError for bytes that are no text."""
        try:
            return self.address.transports[transport].decode()
        except UnicodeDecodeError:
            raise TransferError(f"the KV handle has a malformed address for {transport}") from None

    def check_offer(self, offered: PoolInfo) -> None:
        """Raise TransferError unless what a socket hands out is the pool that the handle means.

        The number of blocks is the socket's to say: it may hand out a staging area.
        """
        if (offered.worker_id, offered.epoch) != (self.worker_id, self.epoch):
            raise TransferError("the socket is another worker's, or this one has restarted (stale epoch)")
        if not self.geometry.has_blocks_of(offered.geometry):
            raise TransferError("the socket hands out another pool than the KV handle describes")


@dataclass(frozen=True, slots=True)
class PeerLease:
    """A handle that was read: shards in the order of ranks, all of the same blocks."""

    lease_id: LeaseId
    worker_id: WorkerId
    epoch: Epoch
    num_tokens: int
    lease_seconds: float
    shards: tuple[PeerShard, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.shards[0].block_ids)

    @property
    def kv_address(self) -> str:
        """Address of the service that renews and releases the lease."""
        return self.shards[0].address.kv_address


class HandleWriter:
    """Writes the handles of one worker's leases."""

    def __init__(self, worker_id: str, shards: Sequence[HandleShard], lease_seconds: float) -> None:
        """Keep the shards that every handle names, in the order of ranks."""
        self._worker_id = WorkerId(worker_id)
        self._shards = shards
        self.lease_seconds = lease_seconds

    def write(self, lease: Lease, num_tokens: int, digests: Sequence[Sequence[int]]) -> KvHandle:
        """The handle of a lease on blocks that hold the KV of `num_tokens`; of each shard one digest per block."""
        shards = tuple(
            pack_shard(shard.geometry, shard.address, lease.block_ids, own)
            for shard, own in zip(self._shards, digests, strict=True)
        )
        return KvHandle(lease.lease_id, self._worker_id, lease.epoch, num_tokens, self.lease_seconds, shards)


def pack_shard(
    geometry: PoolGeometry, address: ShardAddress, block_ids: Sequence[BlockId], digests: Sequence[int]
) -> bytes:
    ids, sums = np.array(block_ids, "<u4").tobytes(), np.array(digests, "<u8").tobytes()
    where = [address.kv_address, address.needs_staging, address.transports]
    return msgspec.msgpack.encode([FORMAT, geometry_to_wire(geometry), where, ids, sums])


def open_handle(handle: KvHandle) -> PeerLease:
    """Read what another worker wrote.

    Raises TransferError for a handle that is malformed or contradicts itself, HandshakeError for another version's.
    """
    if not handle.lease_id or not 1 <= len(handle.shards) <= MAX_SHARDS:
        raise TransferError("malformed KV handle")
    shards = tuple(_unpack_shard(handle, data, rank) for rank, data in enumerate(handle.shards))
    first = shards[0].geometry
    if not are_all_shards([shard.geometry.shard for shard in shards], first.layout):
        raise TransferError("a KV handle whose shards are not all those of one worker")
    for shard in shards:
        if not shard.geometry.has_blocks_of(replace(first, shard=shard.geometry.shard)):
            raise TransferError("a KV handle whose shards are not all those of one worker")
        if len(shard.block_ids) != len(shards[0].block_ids):
            raise TransferError("a KV handle whose shards hold different numbers of blocks")
    return PeerLease(
        handle.lease_id, handle.worker_id, handle.epoch, handle.num_tokens, handle.lease_seconds, shards
    )  # fmt: skip


def _unpack_shard(handle: KvHandle, data: bytes, rank: int) -> PeerShard:
    """Decode and check one shard. Raises TransferError or HandshakeError."""
    if len(data) > MAX_SHARD_BYTES:
        raise TransferError("a KV handle of impossible size")
    try:
        value: Any = msgspec.msgpack.decode(data)
        match value:
            case [int() as number, *_] if number != FORMAT:
                raise HandshakeError(f"a KV handle of format {number}, not {FORMAT}: run the same version everywhere")
            case [int(), geometry, where, bytes() as ids, bytes() as digests] if (
                2 * len(ids) == len(digests) and len(ids) % 4 == 0 and len(ids) // 4 <= MAX_HANDLE_BLOCKS
            ):
                address = from_fields(ShardAddress, where)
            case _:
                raise TransferError("malformed KV handle")
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
        raise TransferError("malformed KV handle") from error
    return PeerShard(
        handle.lease_id,
        handle.worker_id,
        handle.epoch,
        geometry_from_wire(geometry),
        address,
        cast("tuple[BlockId, ...]", tuple(np.frombuffer(ids, "<u4").tolist())),
        tuple(np.frombuffer(digests, "<u8").tolist()),
        rank,
    )
