"""Pull KV blocks from a peer: choose the transport, verify the digests of what arrives.

    client = KvClient(my_geometry, {"shm": ShmReader(my_blocks, leases)})
    lease = open_handle(handle)
    client.pull(lease, positions, local_block_ids)       # copied and verified, or TransferError

Blocking and safe to call from several threads; knows neither schedulers nor requests. What a failed pull left in
the local blocks is garbage: the caller publishes a block only after `pull` returned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.errors import HandshakeError, MiniInferError, TransferError, UnavailableError
from common.wings import has_wing
from kvstore.handle.handle import PeerLease, PeerShard
from kvstore.handle.pool_info import check_compatible
from kvstore.layout import PoolGeometry
from kvstore.transports.transport import BlockPull, Reader, SourcePart
from kvstore.types import BlockId, Epoch, WorkerId

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE_SECONDS = 30.0
FALLBACK_SECONDS = 5.0  # a peer on which so much was spent has stopped: no other transport will find it better


@dataclass(frozen=True, slots=True)
class PullResult:
    transport: str
    num_bytes: int
    seconds: float


class KvClient:
    """Reads leases of other workers' pools by the best transport that both sides have."""

    def __init__(self, geometry: PoolGeometry, readers: Mapping[str, Reader]) -> None:
        """`readers` by transport, the best first, all into the pool of `geometry`. Closes them."""
        self.transports = tuple(readers)
        self._geometry = geometry
        self._readers = readers
        self._chosen: dict[tuple[WorkerId, Epoch], str] = {}  # for the log: one line per change
        self._lock = threading.Lock()

    def pull(
        self,
        lease: PeerLease,
        positions: Sequence[int],
        local_block_ids: Sequence[BlockId],
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    ) -> PullResult:
        """Copy and verify the lease's blocks at `positions`.

        Raises HandshakeError when the pools do not fit, TransferError for anything that did not work or
        did not arrive intact.
        """
        if len(positions) != len(local_block_ids):
            raise ValueError("one local block per position")
        if positions and not 0 <= min(positions) <= max(positions) < lease.num_blocks:
            raise TransferError("a position outside the KV handle")
        began = time.monotonic()
        check_compatible(self._geometry, lease.shards[0].geometry, lease.worker_id)
        parts = self._parts(lease)
        transport, digests = self._pull_best(BlockPull(parts, positions, local_block_ids, began + deadline_seconds))
        for part, found in zip(parts, digests, strict=True):
            granted = [part.shard.digests[position] for position in positions]
            if found != granted:
                position = next(p for p, a, b in zip(positions, found, granted, strict=True) if a != b)
                raise TransferError(f"block {position} of worker {lease.worker_id} did not arrive intact")
        return PullResult(transport, len(positions) * self._geometry.block_bytes, time.monotonic() - began)

    def _parts(self, lease: PeerLease) -> list[SourcePart]:
        """What to read of which shard. Raises HandshakeError."""
        shards = tuple(shard.geometry.shard for shard in lease.shards)
        if shards == (self._geometry.shard,):
            return [SourcePart(lease.shards[0])]
        if not has_wing("kvstore.handle.head_split"):
            raise HandshakeError(
                f"worker {lease.worker_id} has {len(shards)} ranks: to read their KV needs "
                "kvstore.handle.head_split, which this installation lacks"
            )
        from kvstore.transports.head_parts import head_parts

        return head_parts(self._geometry, lease.shards)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _pull_best(self, pull: BlockPull) -> tuple[str, list[list[int]]]:
        """Pull by the first transport that works; return its name and the digests.

        Raises TransferError, or UnavailableError when there is no transport in common.
        """
        shard = pull.parts[0].shard
        failures: list[str] = []
        began = time.monotonic()
        for name, reader in self._readers.items():
            if not all(name in part.shard.address.transports for part in pull.parts):
                continue
            if failures and time.monotonic() - began > FALLBACK_SECONDS:
                break
            try:
                digests = reader.pull(pull)
            except MiniInferError as error:
                failures.append(f"{name}: {error}")
                continue
            self._note_choice(shard, name, failures)
            return name, digests
        if not failures:
            raise UnavailableError(f"no transport in common with worker {shard.worker_id}")
        raise TransferError(f"worker {shard.worker_id} cannot be read ({'; '.join(failures)})")

    def _note_choice(self, peer: PeerShard, name: str, failures: list[str]) -> None:
        with self._lock:
            known = self._chosen.get((peer.worker_id, peer.epoch))
            if known == name:
                return
            if len(self._chosen) >= 1024:
                self._chosen.clear()
            self._chosen[peer.worker_id, peer.epoch] = name
        reason = f" ({'; '.join(failures)})" if failures else ""
        logger.info("KV of worker %s is read by %s%s", peer.worker_id, name, reason)
