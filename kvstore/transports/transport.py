"""What a transport is: one way to move blocks from a pool of one worker into a pool of another.

A transport is a folder, `kvstore/transports/<name>/` or one of the worker where it needs torch, and a line of
`worker/config.py`. Nobody else knows its name; its addresses travel in KV handles as bytes that only it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from kvstore.handle.pool_info import PoolInfo
from kvstore.transports.host_pull import BlockPull, Blocks
from kvstore.transports.lease_client import LeaseClient
from kvstore.types import BlockId, Epoch, LeaseId


class Reader(Protocol):
    """Fills one local pool by one transport. Connections and mappings are made at need, and kept until `close`.

    Used from several threads.
    """

    def pull(self, pull: BlockPull) -> list[list[int]]:
        """Copy blocks; return the digests of what was read, by part, to be compared.

        Raises TransferError or UnavailableError. After a failure nothing is on its way to the local blocks: another
        transport may fill them.
        """
        ...

    def close(self) -> None: ...


class LocalPool(Protocol):
    """The pool of one rank of this worker."""

    info: PoolInfo
    host_blocks: Blocks  # what peers read of host memory, [num_rows, block_bytes]: the pool, or rows in front
    socket_path: str  # Unix socket that hands out a descriptor of `host_blocks`

    def through_host(self, reader: Reader) -> Reader:
        """A reader into the pool, made of one that fills rows of `host_blocks`."""
        ...

    def shm_reader(self, leases: LeaseClient) -> Reader:
        """A reader of peers' host memory into the pool."""
        ...


class LeaseHolder(Protocol):
    """The engine's leases. Called from several threads."""

    def hold(self, lease_id: LeaseId, epoch: Epoch, positions: Sequence[int]) -> list[BlockId]:
        """The lease's blocks at `positions`, which stay its own until `let_go`. Raises TransferError."""
        ...

    def let_go(self, lease_id: LeaseId) -> None: ...


@dataclass(frozen=True, slots=True)
class OwnWorker:
    """What a transport may need to know of the worker that it belongs to."""

    host: str  # to listen on
    token: str  # that peers must show, and are shown


class Transport:
    """One way to move blocks, for all pools of one worker. What a transport has no use for it inherits."""

    name: ClassVar[str]
    offered: ClassVar[Literal["always", "auto", "named"]] = "always"
    """When peers may read by it: always, unless another one is named, or only when it is named itself."""
    maps_device_memory: ClassVar[bool] = False
    """Whether pools must be in memory of the device that processes can share."""
    needs: ClassVar[str] = ""
    """What a worker without a reader lacks, for the message to who has named it."""

    def __init__(self, worker: OwnWorker) -> None:
        """Raise ConfigError when it cannot be used here."""
        self.worker = worker

    def reader(self, pool: LocalPool, leases: LeaseClient) -> Reader | None:
        """A reader into the pool; None: not here. `leases` stays the caller's to close."""
        raise NotImplementedError

    def export(self, pool: LocalPool) -> bytes | None:
        """Let peers read the pool; return its address, for their readers; None: not offered.

        Ranks come in their order. Raises ConfigError.
        """
        raise NotImplementedError

    def describe(self) -> bytes:
        """What peers are told only if they have the cluster's token; called after all exports."""
        return b""

    def serve(self, leases: LeaseHolder) -> None:
        """Peers may come from now on."""

    def close(self) -> None:
        """End what `export` and `serve` have started."""
