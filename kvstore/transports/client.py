"""Pulls KV blocks from a peer: chooses the transport and verifies the digests of the received blocks.

    client = KvClient(my_geometry, {"shm": ShmReader(my_blocks, leases)})
    lease = open_handle(handle)
    client.pull(lease, positions, local_block_ids)       # copied and verified, or TransferError

Blocking, and safe to call from several threads; knows neither schedulers nor requests. A failed pull leaves garbage
in the local blocks: the caller publishes a block only after `pull` has returned.
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
    """Reads leased blocks of other workers by the best transport that both sides have."""

    def __init__(self, geometry: PoolGeometry, readers: Mapping[str, Reader]) -> None:
        """readers: by transport, best first, all for the local pool of `geometry`. The client closes them."""
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

        Raises HandshakeError if the pools are incompatible, TransferError if the transfer fails or a block arrives
        corrupted.
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
        for part, received in zip(parts, digests, strict=True):
            expected = [part.shard.digests[position] for position in positions]
            if received != expected:
                position = next(p for p, a, b in zip(positions, received, expected, strict=True) if a != b)
                raise TransferError(f"block {position} of worker {lease.worker_id} did not arrive intact")
        return transport

    def _parts(self, lease: PeerLease) -> list[SourcePart]:
        """Return the parts to read from the lease's shards. Raises HandshakeError."""
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
        """Return the transports that can read all parts, best first. Raises UnavailableError if there is none."""
        offered = [part.shard.address.transports for part in pull.parts]
        common = [(name, reader) for name, reader in self._readers.items() if all(name in each for each in offered)]
        if not common:
            raise UnavailableError(f"no transport in common with worker {pull.parts[0].shard.worker_id}")
        return common

    def read(self, pull: BlockPull) -> tuple[str, list[list[int]]]:
        """Copy by the best common transport; return its name and the digests.

        Raises UnavailableError if there is none, and the errors of `Reader.pull`.
        """
        name, reader = self.in_common(pull)[0]
        return name, reader.pull(pull)


def check_compatible(mine: PoolGeometry, theirs: PoolGeometry, worker_id: WorkerId) -> None:
    """Raise HandshakeError, with all differences and a remedy, if the pools differ in more than their shards."""
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
