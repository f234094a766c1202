"""Leases: permissions for a peer to read blocks for a limited time.

Pure: the clock is an argument (seconds of time.monotonic, which all processes of a host share). A lease holds one
reference on each of its blocks: the caller does `pool.acquire` before it grants one and `pool.release` with the
leases that `release` and `expire` return. A worker's front keeps a copy of its engine's table (`adopt`, `release`),
so that reads need no message to the engine; both have the same deadlines.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import TransferError
from kvstore.types import BlockId, Epoch, LeaseId

MAX_LEASE_SECONDS = 600.0


def new_epoch() -> Epoch:
    """Draw the epoch of a new pool: 64 random bits, never 0."""
    return Epoch(secrets.randbits(64) | 1)


@dataclass(slots=True)
class Lease:
    """`block_ids`, in sequence order, may be read before the time `deadline`."""

    lease_id: LeaseId
    epoch: Epoch
    block_ids: tuple[BlockId, ...]
    deadline: float


class LeaseTable:
    """All leases of one pool in one epoch. Refuses other epochs and unknown leases."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._leases: dict[LeaseId, Lease] = {}
        self._next_deadline = math.inf  # no lease expires earlier; makes expire() cheap

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, lease_id: LeaseId) -> Lease | None:
        return self._leases.get(lease_id)

    def grant(self, block_ids: Sequence[BlockId], now: float, lease_seconds: float) -> Lease:
        """Grant a lease with an unguessable id."""
        lease_id = LeaseId(secrets.token_hex(16))
        return self.adopt(Lease(lease_id, self.epoch, tuple(block_ids), now + _bounded(lease_seconds)))

    def adopt(self, lease: Lease) -> Lease:
        """Add a lease that another table of this pool granted."""
        self._leases[lease.lease_id] = lease
        self._next_deadline = min(self._next_deadline, lease.deadline)
        return lease

    def renew(self, lease_id: LeaseId, epoch: Epoch, now: float, lease_seconds: float) -> bool:
        """Extend a valid lease to at least `lease_seconds` from now. Returns False if the lease is not valid."""
        lease = self._leases.get(lease_id)
        if lease is None or epoch != self.epoch or now >= lease.deadline:
            return False
        lease.deadline = max(lease.deadline, now + _bounded(lease_seconds))
        return True

    def release(self, lease_id: LeaseId, epoch: Epoch) -> Lease | None:
        """End and return a lease; None if there is none, for example because it was released before."""
        return self._leases.pop(lease_id, None) if epoch == self.epoch else None

    def expire(self, now: float) -> list[Lease]:
        """End and return the leases whose deadline has passed."""
        if now < self._next_deadline:
            return []
        expired = [lease for lease in self._leases.values() if now >= lease.deadline]
        for lease in expired:
            del self._leases[lease.lease_id]
        self._next_deadline = min((lease.deadline for lease in self._leases.values()), default=math.inf)
        return expired

    def resolve(self, lease_id: LeaseId, epoch: Epoch, positions: Sequence[int] | None, now: float) -> list[BlockId]:
        """Return a lease's blocks at `positions` (None: all). Raises TransferError if they may not be read."""
        if epoch != self.epoch:
            raise TransferError("the KV blocks belong to an earlier life of the worker (stale epoch)")
        lease = self._leases.get(lease_id)
        if lease is None:
            raise TransferError("unknown or released lease")
        if now >= lease.deadline:
            raise TransferError("the lease has expired")
        num_blocks = len(lease.block_ids)
        if positions is None:
            return list(lease.block_ids)
        for position in positions:
            if not 0 <= position < num_blocks:
                raise TransferError(f"position {position} is outside the lease of {num_blocks} blocks")
        return [lease.block_ids[position] for position in positions]


def _bounded(lease_seconds: float) -> float:
    """Clamp a duration that a peer requested to [0, MAX_LEASE_SECONDS]; NaN becomes 0."""
    return min(lease_seconds, MAX_LEASE_SECONDS) if lease_seconds > 0 else 0.0
