"""Rows of a peer's host memory, to which it copies a lease's blocks from GPU memory on request."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import TransferError
from kvstore.handle.handle import PeerShard, rows_at
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.types import BlockId
from protos import kvstore_pb2


def staged_rows(
    shard: PeerShard, positions: Sequence[int], num_rows: int, leases: LeaseClient, deadline_seconds: float
) -> list[BlockId]:
    """Return the rows, below `num_rows`, of the lease's blocks at `positions`. Raises UnavailableError,
    TransferError."""
    first = min(positions, default=0)
    staged = stage(leases, shard, first, deadline_seconds)
    return rows_at(staged, [position - first for position in positions], num_rows)


def stage(leases: LeaseClient, shard: PeerShard, first: int, deadline_seconds: float) -> list[BlockId]:
    """Have the peer copy the lease's blocks from position `first` on to its shared memory; return their rows.

    Raises UnavailableError, or TransferError if the peer cannot do it.
    """
    request = kvstore_pb2.StageRequest(lease_id=shard.lease_id, epoch=shard.epoch, rank=shard.rank, first=first)
    rows = leases.call(shard.address.kv_address, "Stage", request, deadline_seconds).rows
    if len(rows) != len(shard.block_ids) - first:
        raise TransferError("the peer has staged another lease")
    return [BlockId(row) for row in rows]
