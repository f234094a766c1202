"""Description of a pool, whether KV may move between two pools, and which blocks a lease names there. No I/O.

A description is plain lists that msgpack carries, in a KV handle's shards and from a pool's descriptor socket. What a
peer sends is bounded here before anything is computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from inspect import get_annotations
from typing import Any, TypeVar

import msgspec

from common.errors import ConfigError, HandshakeError, TransferError
from kvstore.layout import KvGroup, KvLayout, PoolGeometry, Shard
from kvstore.pool.block_hash import HASH_VERSION
from kvstore.types import BlockId, Epoch, WorkerId

MAX_GROUPS = 16
MAX_BLOCKS = 1 << 26
MAX_POOL_BYTES = 1 << 46
MAX_TEXT = 1024  # characters of a name or fingerprint
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """One life (`epoch`) of one rank's pool, or of the staging area in front of it."""

    worker_id: WorkerId
    epoch: Epoch
    geometry: PoolGeometry


def info_to_wire(info: PoolInfo) -> list[Any]:
    return [info.worker_id, info.epoch, geometry_to_wire(info.geometry)]


def info_from_wire(value: Any) -> PoolInfo:
    """Decode a peer's description of its pool. Raises HandshakeError for anything else."""
    match value:
        case [str() as worker_id, int() as epoch, geometry] if len(worker_id) <= MAX_TEXT:
            return PoolInfo(WorkerId(worker_id), Epoch(epoch), geometry_from_wire(geometry))
    raise HandshakeError("the peer's description of its KV pool is malformed")


def geometry_to_wire(geometry: PoolGeometry) -> list[Any]:
    groups, shard = [astuple(group) for group in geometry.layout.groups], geometry.shard
    return [
        HASH_VERSION, geometry.fingerprint, geometry.num_blocks, geometry.block_size, shard.rank, shard.size, groups,
        *([] if shard.layers is None else [shard.layers]),
    ]  # fmt: skip


def geometry_from_wire(value: Any) -> PoolGeometry:
    """Decode a pool's geometry. Raises HandshakeError for a peer of another version, or an impossible geometry."""
    match value:
        case [int() as hash_version, *_] if hash_version != HASH_VERSION:
            raise HandshakeError(
                f"the peer computes block keys by version {hash_version}, this worker by version {HASH_VERSION}: run "
                "the same version of mini-infer everywhere"
            )
        case [int(), str() as fingerprint, int() as num_blocks, int() as block_size, int() as rank, int() as size,
              list() as groups]:  # fmt: skip
            shard = Shard(rank, size)
        case [int(), str() as fingerprint, int() as num_blocks, int() as block_size, int() as rank, int() as size,
              list() as groups, [int() as first, int() as stop]]:  # fmt: skip
            shard = Shard(rank, size, (first, stop))
        case _:
            raise HandshakeError("the peer's description of its KV pool is malformed")
    if not 1 <= num_blocks <= MAX_BLOCKS or len(fingerprint) > MAX_TEXT or len(groups) > MAX_GROUPS:
        raise HandshakeError("the peer's description of its KV pool is out of bounds")
    try:
        layout = KvLayout(tuple(map(_group_from_wire, groups)))
        geometry = PoolGeometry(layout, num_blocks, block_size, fingerprint, shard)
    except ConfigError as error:
        raise HandshakeError(f"the peer describes KV that this worker does not know: {error}") from error
    if geometry.pool_bytes > MAX_POOL_BYTES:
        raise HandshakeError("the peer's KV pool is larger than any machine's memory")
    return geometry


def _group_from_wire(value: Any) -> KvGroup:
    """Decode one group of a layout. Raises ConfigError."""
    try:
        group = from_fields(KvGroup, value)
    except ValueError as error:
        raise ConfigError("a malformed KV group") from error
    if len(group.name) > MAX_TEXT:
        raise ConfigError("a KV group of a longer name than is allowed")
    return group


def from_fields(kind: type[T], values: Any) -> T:
    """Make a dataclass of a list of its fields. Raises ValueError for another list or other types."""
    names = list(get_annotations(kind))
    if not isinstance(values, list) or len(values) != len(names):
        raise ValueError(f"a {kind.__name__} of other than {len(names)} values")
    return msgspec.convert(dict(zip(names, values, strict=True)), kind, builtin_types=(bytes,))


def check_compatible(mine: PoolGeometry, theirs: PoolGeometry, worker_id: WorkerId) -> None:
    """Raise HandshakeError that names all that differs, and what to do about it. Shards may differ."""
    pairs = [
        ("model", mine.fingerprint, theirs.fingerprint),
        ("KV dtype", mine.dtype, theirs.dtype),
        ("block size", mine.block_size, theirs.block_size),
        ("KV layout", mine.layout, theirs.layout),
    ]
    differing = [f"{name}: {a} here, {b} there" for name, a, b in pairs if a != b]
    if differing:
        raise HandshakeError(
            f"worker {worker_id} holds other KV ({'; '.join(differing)}): start all workers with the same "
            "--model, --dtype, --quant-mode, --kv-cache-dtype, --block-size and version"
        )


def rows_at(rows: Sequence[BlockId], positions: Sequence[int], num_rows: int) -> list[BlockId]:
    """Select the lease's rows at `positions`. Raises TransferError when one lies outside a pool of `num_rows`."""
    chosen = [rows[position] for position in positions]
    if chosen and not 0 <= min(chosen) <= max(chosen) < num_rows:
        raise TransferError("the KV handle names a block outside the peer's pool")
    return chosen
