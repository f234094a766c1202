"""Description of a pool, whether KV may move between two pools, and which blocks a lease names there. No I/O.

A description is plain lists that msgpack carries, in a KV handle's shards and from a pool's descriptor socket. What a
peer sends is bounded here before anything is computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError, HandshakeError, TransferError
from kvstore.layout import KvGroup, KvLayout, PoolGeometry, Shard
from kvstore.pool.block_hash import HASH_VERSION
from kvstore.types import BlockId, Epoch, WorkerId

MAX_GROUPS = 16
MAX_BLOCKS = 1 << 26
MAX_POOL_BYTES = 1 << 46
MAX_TEXT = 1024  # characters of a name or fingerprint


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
    groups = [
        [g.name, g.kind, g.layers, g.num_kv_heads, g.head_dim, g.dtype, g.num_planes, g.window]
        for g in geometry.layout.groups
    ]
    shard = geometry.shard
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
    match value:
        case [
            str() as name,
            "full" | "window" | "latent" | "state" as kind,
            list() as layers,
            int() as num_kv_heads,
            int() as head_dim,
            str() as dtype,
            int() as num_planes,
            int() as window,
        ] if len(name) <= MAX_TEXT and all(type(layer) is int for layer in layers):
            return KvGroup(name, kind, tuple(layers), num_kv_heads, head_dim, dtype, num_planes, window)
    raise ConfigError("a malformed KV group")


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
