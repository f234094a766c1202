"""KV handles: what a worker needs to read a prompt's KV from another. The only file that knows a shard's bytes.

    writer:  HandleWriter.write(lease, ...) -> protobuf's KvHandle, one shard of bytes per rank
    between: worker front, router and journal pass the handle on unread; id and epoch suffice to end the lease
    reader:  open_handle(handle) -> PeerLease, checked

A shard is msgpack, see `_WrittenShard`. Only a transport itself can read its address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast

import msgspec
import numpy as np

from common.errors import ConfigError, HandshakeError, TransferError
from kvstore.layout import PoolGeometry
from kvstore.pool.block_hash import HASH_VERSION
from kvstore.pool.leases import Lease
from kvstore.types import BlockId, Epoch, LeaseId, WorkerId
from protos import types_pb2 as pb

T = TypeVar("T")
MAX_TEXT = 1024  # characters of a name or fingerprint
PoolName = tuple[WorkerId, int]  # worker and rank
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Addresses = Annotated[Mapping[Text, Annotated[bytes, msgspec.Meta(max_length=1 << 16)]], msgspec.Meta(max_length=64)]
FORMAT = f"5.{HASH_VERSION}"  # version of the shard format and of block keys
MAX_SHARDS = 256
MAX_HANDLE_BLOCKS = 1 << 20
MAX_SHARD_BYTES = 16 << 20  # 12 bytes a block, and some for the other fields
MAX_GROUPS = 16
MAX_BLOCKS = 1 << 26
MAX_POOL_BYTES = 1 << 46


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """Where one rank's pool can be read."""

    kv_address: Text = ""  # host:port of the KvTransfer service
    needs_staging: bool = False  # the blocks are in GPU memory; the owner copies them to host memory on request
    transports: Addresses = field(default_factory=dict)  # the address for each transport that the owner offers


class _WrittenShard(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A shard as it is serialized; ids and digests are little-endian integers of 4 and 8 bytes."""

    format: str
    geometry: PoolGeometry
    address: ShardAddress
    block_ids: bytes
    digests: bytes


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """One rank's pool in one epoch, or the staging area of a pool in GPU memory, as its socket describes it."""

    worker_id: WorkerId
    epoch: Epoch
    geometry: PoolGeometry


@dataclass(frozen=True, slots=True)
class HandleShard:
    """The pool of one rank, as its owner describes it in handles."""

    geometry: PoolGeometry
    address: ShardAddress


@dataclass(frozen=True, slots=True)
class PeerShard:
    """The blocks of a lease in one rank's pool."""

    lease_id: LeaseId
    worker_id: WorkerId
    epoch: Epoch
    geometry: PoolGeometry
    address: ShardAddress
    block_ids: tuple[BlockId, ...]
    digests: tuple[int, ...]  # one per block
    rank: int = 0  # index among the handle's shards; identifies the pool to its owner

    @property
    def pool_name(self) -> PoolName:
        return self.worker_id, self.rank

    def address_for(self, transport: str) -> str:
        """Return the pool's address for an offered transport. Raises TransferError unless it is valid UTF-8."""
        try:
            return self.address.transports[transport].decode()
        except UnicodeDecodeError:
            raise TransferError(f"the KV handle has a malformed address for {transport}") from None

    def check_offer(self, offered: PoolInfo) -> None:
        """Raise TransferError unless a socket hands out the pool that the handle describes.

        The number of blocks may differ, because the socket may hand out a staging area.
        """
        if (offered.worker_id, offered.epoch) != (self.worker_id, self.epoch):
            raise TransferError("the socket is another worker's, or this one has restarted (stale epoch)")
        if not self.geometry.has_blocks_of(offered.geometry):
            raise TransferError("the socket hands out another pool than the KV handle describes")


@dataclass(frozen=True, slots=True)
class PeerLease:
    """The content of a handle: one shard per rank, in order, all with the same number of blocks."""

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
        """The address of the service that renews and releases the lease."""
        return self.shards[0].address.kv_address


@dataclass(frozen=True, slots=True)
class HandleWriter:
    """Writes the handles of one worker's leases, each of which lists the worker's shards."""

    worker_id: str
    shards: Sequence[HandleShard]  # in the order of ranks
    lease_seconds: float

    def write(self, lease: Lease, num_tokens: int, digests: Sequence[Sequence[int]]) -> pb.KvHandle:
        """Write the handle of a lease on the KV of `num_tokens`. digests: for each shard, one per block."""
        shards = [
            pack_shard(shard.geometry, shard.address, lease.block_ids, shard_digests)
            for shard, shard_digests in zip(self.shards, digests, strict=True)
        ]
        return pb.KvHandle(
            lease_id=lease.lease_id, worker_id=self.worker_id, epoch=lease.epoch, num_tokens=num_tokens,
            lease_seconds=self.lease_seconds, shards=shards,
        )  # fmt: skip


def pack_shard(
    geometry: PoolGeometry, address: ShardAddress, block_ids: Sequence[BlockId], digests: Sequence[int]
) -> bytes:
    ids, sums = np.array(block_ids, "<u4").tobytes(), np.array(digests, "<u8").tobytes()
    return msgspec.msgpack.encode(_WrittenShard(FORMAT, geometry, address, ids, sums))


def open_handle(handle: pb.KvHandle) -> PeerLease:
    """Read a handle that another worker wrote.

    Raises TransferError for a malformed or inconsistent handle, HandshakeError for one of another version.
    """
    if not handle.lease_id or not 1 <= len(handle.shards) <= MAX_SHARDS:
        raise TransferError("malformed KV handle")
    name = LeaseId(handle.lease_id), WorkerId(handle.worker_id), Epoch(handle.epoch)
    shards = tuple(_unpack_shard(name, data, rank) for rank, data in enumerate(handle.shards))
    if any(len(shard.block_ids) != len(shards[0].block_ids) for shard in shards):
        raise TransferError("a KV handle whose shards hold different numbers of blocks")
    return PeerLease(*name, handle.num_tokens, handle.lease_seconds, shards)


def _unpack_shard(name: tuple[LeaseId, WorkerId, Epoch], data: bytes, rank: int) -> PeerShard:
    """Decode and check one shard. Raises TransferError or HandshakeError."""
    if len(data) > MAX_SHARD_BYTES:
        raise TransferError("a KV handle of impossible size")
    try:
        value = msgspec.msgpack.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
        raise TransferError("malformed KV handle") from error
    match value:
        case [number, *_] if number != FORMAT:
            raise HandshakeError(f"a KV handle of format {number}, not {FORMAT}: run the same version everywhere")
    shard = from_wire(_WrittenShard, value, "KV handle")
    ids, digests = shard.block_ids, shard.digests
    if 2 * len(ids) != len(digests) or len(ids) % 4 or len(ids) // 4 > MAX_HANDLE_BLOCKS:
        raise TransferError("malformed KV handle")
    block_ids = cast("tuple[BlockId, ...]", tuple(np.frombuffer(ids, "<u4").tolist()))
    sums = tuple(np.frombuffer(digests, "<u8").tolist())
    return PeerShard(*name, shard.geometry, shard.address, block_ids, sums, rank)


def from_wire(kind: type[T], value: Any, what: str) -> T:
    """Convert decoded msgpack to a `kind`, which has a `geometry`, and check its bounds.

    Raises TransferError for a malformed value, HandshakeError for KV that this worker does not know.
    """
    try:
        converted: Any = msgspec.convert(value, kind, builtin_types=(bytes,))
    except ValueError as error:
        raise TransferError(f"malformed {what}") from error
    except ConfigError as error:
        raise HandshakeError(f"the peer describes KV that this worker does not know: {error}") from error
    geometry: PoolGeometry = converted.geometry
    groups = geometry.layout.groups
    names = [geometry.fingerprint, *(group.name for group in groups)]
    if not 1 <= geometry.num_blocks <= MAX_BLOCKS or len(groups) > MAX_GROUPS or max(map(len, names)) > MAX_TEXT:
        raise HandshakeError("the peer's description of its KV pool is out of bounds")
    if geometry.pool_bytes > MAX_POOL_BYTES:
        raise HandshakeError("the peer's KV pool is larger than any machine's memory")
    return cast("T", converted)


def rows_at(rows: Sequence[BlockId], positions: Sequence[int], num_rows: int) -> list[BlockId]:
    """Return the lease's rows at `positions`. Raises TransferError for a row outside a pool of `num_rows`."""
    chosen = [rows[position] for position in positions]
    if chosen and not 0 <= min(chosen) <= max(chosen) < num_rows:
        raise TransferError("the KV handle names a block outside the peer's pool")
    return chosen
