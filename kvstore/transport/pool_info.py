"""What a pool says of itself, whether KV may move between two pools, and which blocks a lease names there. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from common.errors import HandshakeError, TransferError
from kvstore.layout import DTYPE_BYTES, MAX_DIMENSION, PoolGeometry, full_attention
from kvstore.pool.block_hash import HASH_VERSION
from kvstore.types import BlockId, Epoch, PeerPool, WorkerId
from protos import kvstore_pb2

MAX_BLOCKS = 1 << 26
MAX_POOL_BYTES = 1 << 46


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """One life (`epoch`) of one worker's pool. `shm_socket` is empty where no descriptor is handed out."""

    worker_id: WorkerId
    epoch: Epoch
    geometry: PoolGeometry
    transports: tuple[str, ...] = ("shm", "tcp")  # best first
    shm_socket: str = ""
    hash_version: int = HASH_VERSION


def to_proto(info: PoolInfo) -> kvstore_pb2.PoolInfo:
    geometry = info.geometry
    return kvstore_pb2.PoolInfo(
        worker_id=info.worker_id,
        epoch=info.epoch,
        model_fingerprint=geometry.fingerprint,
        hash_version=info.hash_version,
        kv_dtype=geometry.dtype,
        num_blocks=geometry.num_blocks,
        block_bytes=geometry.block_bytes,
        block_shape=geometry.block_shape,
        transports=info.transports,
        shm_socket=info.shm_socket,
    )


def from_proto(message: kvstore_pb2.PoolInfo) -> PoolInfo:
    """Raises HandshakeError for a description that cannot be one of a pool. All integers are bounded."""
    shape = tuple(message.block_shape)
    if message.kv_dtype not in DTYPE_BYTES:
        raise HandshakeError("the peer's KV has a data type that this version does not know")
    if len(shape) != 5 or shape[1] != 2 or not all(1 <= size <= MAX_DIMENSION for size in shape):
        raise HandshakeError("the peer's KV blocks have a shape that this version does not know")
    block_bytes = math.prod(shape) * DTYPE_BYTES[message.kv_dtype]
    if message.block_bytes != block_bytes or not 1 <= message.num_blocks <= MAX_BLOCKS:
        raise HandshakeError("the peer's description of its KV pool contradicts itself")
    if message.num_blocks * block_bytes > MAX_POOL_BYTES:
        raise HandshakeError("the peer's KV pool is larger than any machine's memory")
    layout = full_attention(shape[0], shape[2], shape[4], message.kv_dtype)
    geometry = PoolGeometry(layout, message.num_blocks, shape[3], message.model_fingerprint)
    return PoolInfo(
        worker_id=WorkerId(message.worker_id),
        epoch=Epoch(message.epoch),
        geometry=geometry,
        transports=tuple(message.transports),
        shm_socket=message.shm_socket,
        hash_version=message.hash_version,
    )


def from_bytes(data: bytes) -> PoolInfo:
    """Raises HandshakeError."""
    try:
        return from_proto(kvstore_pb2.PoolInfo.FromString(data))
    except DecodeError as error:
        raise HandshakeError("the peer's description of its KV pool is malformed") from error


def check_compatible(mine: PoolGeometry, theirs: PoolInfo) -> None:
    """Raises HandshakeError that names all that differs, and what to do about it."""
    pairs = [
        ("model", mine.fingerprint, theirs.geometry.fingerprint),
        ("hash version", HASH_VERSION, theirs.hash_version),
        ("KV dtype", mine.dtype, theirs.geometry.dtype),
        ("block size", mine.block_size, theirs.geometry.block_size),
        ("KV layout", mine.layout, theirs.geometry.layout),
    ]
    differing = [f"{name}: {a} here, {b} there" for name, a, b in pairs if a != b]
    if differing:
        raise HandshakeError(
            f"worker {theirs.worker_id} holds other KV ({'; '.join(differing)}): start all workers with the same "
            "--model, --dtype, --quant-mode, --kv-cache-dtype, --block-size and version"
        )


def check_offer(mine: PoolGeometry, peer: PeerPool, offered: PoolInfo) -> None:
    """Whether what a socket hands out is the pool that `peer` means, and fits.

    Raises TransferError (another pool) or HandshakeError (never fits).
    """
    if (offered.worker_id, offered.epoch) != (peer.worker_id, peer.epoch):
        raise TransferError("the socket is another worker's, or this one has restarted (stale epoch)")
    check_compatible(mine, offered)


def rows_at(rows: Sequence[BlockId], positions: Sequence[int], num_rows: int) -> list[BlockId]:
    """Those of a lease's `rows` to read from a pool of `num_rows`. Raises TransferError when one lies outside."""
    chosen = [rows[position] for position in positions]
    if chosen and not 0 <= min(chosen) <= max(chosen) < num_rows:
        raise TransferError("the KV handle names a block outside the peer's pool")
    return chosen
