"""Pull KV blocks from a peer: choose the transport, verify the digests of what arrives.

    client = KvClient(my_geometry, {"shm": ShmReader(my_blocks, leases)})
    lease = open_handle(handle)
    client.pull(lease, positions, local_block_ids)       # copied and verified, or TransferError

Blocking and safe to call from several threads; knows neither schedulers nor requests. What a failed pull left in
the local blocks is garbage: the caller publishes a block only after `pull` returned.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from common.errors import HandshakeError, TransferError, UnavailableError
from common.wings import has_wing
from kvstore.handle.handle import PeerLease
from kvstore.layout import PoolGeometry
from kvstore.transports.transport import BlockPull, Reader, SourcePart
from kvstore.types import BlockId, WorkerId

DEFAULT_DEADLINE_SECONDS = 30.0


class KvClient:
    """Reads leases of other workers' pools by the best transport that both sides have."""

    def __init__(self, geometry: PoolGeometry, readers: Mapping[str, Reader]) -> None:
        """`readers` by transport, the best first, all into the pool of `geometry`. Closes them."""
        self.transports = tuple(readers)
        self.geometry = geometry
        self._readers = readers

    def pull(
        self,
        lease: PeerLease,
        positions: Sequence[int],
        local_block_ids: Sequence[BlockId],
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    ) -> str:
        """Copy and verify the lease's blocks at `positions`; return the transport's name.

        Raises HandshakeError when the pools do not fit, TransferError for anything that did not work or
        did not arrive intact.
        """
        if len(positions) != len(local_block_ids):
            raise ValueError("one local block per position")
        if positions and not 0 <= min(positions) <= max(positions) < lease.num_blocks:
            raise TransferError("a position outside the KV handle")
        check_compatible(self.geometry, lease.shards[0].geometry, lease.worker_id)
        parts = self._parts(lease)
        transport, digests = self.read(
            BlockPull(parts, positions, local_block_ids, time.monotonic() + deadline_seconds)
        )
        for part, found in zip(parts, digests, strict=True):
            granted = [part.shard.digests[position] for position in positions]
            if found != granted:
                position = next(p for p, a, b in zip(positions, found, granted, strict=True) if a != b)
                raise TransferError(f"block {position} of worker {lease.worker_id} did not arrive intact")
        return transport

    def _parts(self, lease: PeerLease) -> list[SourcePart]:
        """What to read of which shard. Raises HandshakeError."""
        shards = tuple(shard.geometry.shard for shard in lease.shards)
        if shards == (self.geometry.shard,):
            return [SourcePart(lease.shards[0])]
        if not has_wing("kvstore.handle.head_split"):
            raise HandshakeError(
                f"worker {lease.worker_id} has {len(shards)} ranks: to read their KV needs "
                "kvstore.handle.head_split, which this installation lacks"
            )
        from kvstore.transports.head_parts import head_parts

        return head_parts(self.geometry, lease.shards)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def in_common(self, pull: BlockPull) -> list[tuple[str, Reader]]:
        """The transports by which all parts can be read, the best first. Raises UnavailableError without any."""
        offered = [part.shard.address.transports for part in pull.parts]
        found = [(name, reader) for name, reader in self._readers.items() if all(name in each for each in offered)]
        if not found:
            raise UnavailableError(f"no transport in common with worker {pull.parts[0].shard.worker_id}")
        return found

    def read(self, pull: BlockPull) -> tuple[str, list[list[int]]]:
        """Copy by the best transport in common; return its name and the digests.

        Raises UnavailableError without one, and what a transport raises.
        """
        name, reader = self.in_common(pull)[0]
        return name, reader.pull(pull)


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
