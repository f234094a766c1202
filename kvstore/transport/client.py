"""Pulling KV blocks from a peer: which transport, and whether what came is what was promised.

    client = host_client(my_geometry, my_blocks, token)
    peer = peer_from_handle(handle)
    client.pull(peer, positions, local_block_ids)       # copied and verified, or TransferError
    client.renew(peer, seconds); client.release(peer)

Blocking and safe to call from several threads; knows neither schedulers nor requests. What a failed pull left in
the local blocks is garbage: the caller publishes a block only after `pull` returned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.errors import HandshakeError, MiniInferError, TransferError, UnavailableError
from kvstore.layout import PoolGeometry
from kvstore.pool.digest import digest_blocks
from kvstore.transport.lease_client import LeaseClient
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp import TcpTransport
from kvstore.types import BlockId, Epoch, LeaseId, PeerPool, WorkerId
from protos import types_pb2

logger = logging.getLogger(__name__)

Blocks = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]
MAX_HANDLE_BLOCKS = 1 << 20
DEFAULT_DEADLINE_SECONDS = 30.0


class Transport(Protocol):
    """One way to move blocks into one local pool. Connections and mappings are made at need, kept until `close`."""

    name: str

    def offered_by(self, peer: PeerPool) -> bool:
        """Whether the peer's handle names what this transport needs."""
        ...

    def open(self, peer: PeerPool) -> None:
        """Reach the peer and compare geometry and epoch, before the first byte.

        Raises HandshakeError (never fits), TransferError or UnavailableError (not now).
        """
        ...

    def pull(
        self,
        peer: PeerPool,
        positions: Sequence[int],
        local_block_ids: Sequence[BlockId],
        deadline_seconds: float,
    ) -> list[int]:
        """Copy the lease's blocks at `positions` to the local blocks `local_block_ids`.

        Returns the digests of what arrived, for the caller to compare. Raises TransferError.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PullResult:
    transport: str
    num_bytes: int
    seconds: float


def peer_from_handle(handle: types_pb2.KvHandle) -> PeerPool:
    """Raises TransferError for a handle that contradicts itself."""
    if (
        not handle.lease_id
        or len(handle.digests) != len(handle.block_ids)
        or len(handle.block_ids) > MAX_HANDLE_BLOCKS
    ):
        raise TransferError("malformed KV handle")
    return PeerPool(
        worker_id=WorkerId(handle.worker_id),
        epoch=Epoch(handle.epoch),
        kv_address=handle.kv_address,
        shm_socket=handle.shm_socket,
        lease_id=LeaseId(handle.lease_id),
        block_ids=tuple(map(BlockId, handle.block_ids)),
        digests=tuple(handle.digests),
        num_tokens=handle.num_tokens,
        lease_seconds=handle.lease_seconds,
        cuda_socket=handle.cuda_socket,
        needs_staging=handle.needs_staging,
    )


def host_transports(
    geometry: PoolGeometry,
    pool: Blocks,
    leases: LeaseClient,
    names: Sequence[str],
    digest: Callable[[Blocks], list[int]] = digest_blocks,
) -> list[Transport]:
    """Those of `names` (best first) that write to host memory: `pool`, uint8 [num_blocks, block_bytes]."""
    known: dict[str, Callable[[], Transport]] = {
        "shm": lambda: ShmTransport(geometry, pool, leases, digest),
        "tcp": lambda: TcpTransport(geometry, pool, leases, digest),
    }
    return [known[name]() for name in names if name in known]


def host_client(
    geometry: PoolGeometry, pool: Blocks, token: str = "", names: Sequence[str] = ("shm", "tcp")
) -> KvClient:
    """A client that fills a pool in host memory."""
    leases = LeaseClient(token)
    return KvClient(host_transports(geometry, pool, leases, names), leases, geometry.block_bytes)


class KvClient:
    """Reads leases of other workers' pools by the best transport that both sides have."""

    def __init__(self, transports: Sequence[Transport], leases: LeaseClient, block_bytes: int) -> None:
        """`transports` in order of preference, all into the same pool. The client closes them and `leases`."""
        self._transports = transports
        self._leases = leases
        self._block_bytes = block_bytes
        self._chosen: dict[tuple[WorkerId, Epoch], str] = {}  # for the log: one line per change
        self._lock = threading.Lock()

    def pull(
        self,
        peer: PeerPool,
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
        if not all(0 <= position < len(peer.block_ids) for position in positions):
            raise TransferError("a position outside the KV handle")
        began = time.monotonic()
        transport = self._open_best(peer)
        digests = transport.pull(peer, positions, local_block_ids, deadline_seconds)
        for position, digest in zip(positions, digests, strict=True):
            if digest != peer.digests[position]:
                raise TransferError(f"block {position} of worker {peer.worker_id} did not arrive intact")
        return PullResult(transport.name, len(positions) * self._block_bytes, time.monotonic() - began)

    def renew(self, peer: PeerPool, lease_seconds: float) -> bool:
        """Keep the lease while waiting. False: it does not hold any more. Raises UnavailableError."""
        return self._leases.renew(peer, lease_seconds)

    def release(self, peer: PeerPool) -> bool:
        """Give the lease back; harmless when it is gone. Raises UnavailableError (it then expires by itself)."""
        return self._leases.release(peer)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        self._leases.close()

    def _open_best(self, peer: PeerPool) -> Transport:
        failures: list[str] = []
        for transport in self._transports:
            if not transport.offered_by(peer):
                continue
            try:
                transport.open(peer)
            except HandshakeError:
                raise  # no transport makes these two pools fit
            except MiniInferError as error:
                failures.append(f"{transport.name}: {error}")
                continue
            self._note_choice(peer, transport.name, failures)
            return transport
        if not failures:
            raise UnavailableError(f"no transport in common with worker {peer.worker_id}")
        raise TransferError(f"worker {peer.worker_id} cannot be read ({'; '.join(failures)})")

    def _note_choice(self, peer: PeerPool, name: str, failures: list[str]) -> None:
        with self._lock:
            known = self._chosen.get((peer.worker_id, peer.epoch))
            if known == name:
                return
            if len(self._chosen) >= 1024:
                self._chosen.clear()
            self._chosen[peer.worker_id, peer.epoch] = name
        reason = f" ({'; '.join(failures)})" if failures else ""
        logger.info("KV of worker %s is read by %s%s", peer.worker_id, name, reason)
