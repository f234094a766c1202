"""Interface of a transport: one way to move blocks from a pool of one worker to a pool of another.

A pull copies parts of a lease's shards (`SourcePart`) to blocks of a local pool (`LocalPool`). Between equal shards,
blocks are copied to their rows unchanged; `head_parts.py` handles shards that are divided differently.

A transport is a folder, `kvstore/transports/<name>/` or, if it needs torch, one in `worker/`, and a line of
`worker/config.py`; `shm.py` is always there. No other code knows a transport's name; its addresses are in KV handles
as bytes that only the transport reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.handle.handle import PeerShard, PoolInfo
from kvstore.layout import HeadCopy
from kvstore.pool.digest import digest_rows
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.shared_memory import DescriptorServer, blocks_over, create_memfd, map_fd, reopen_read_only
from kvstore.types import BlockId, Epoch, LeaseId

Blocks = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The part to read of each block of one of a lease's shards; without `copy` the whole block, unchanged."""

    shard: PeerShard
    copy: HeadCopy | None = None

    def pull(self, read: ReadBlocks, pull: BlockPull, blocks: Blocks) -> list[int]:
        """Copy the part to rows of `blocks`; return the digests of the blocks read."""
        read(self.shard, pull.positions, blocks, pull.local_block_ids, pull.seconds_left)
        return digest_rows(blocks, pull.local_block_ids)

    def put(self, source: Blocks, target: Blocks, rows: Sequence[int]) -> None:
        """Copy the part of each of the shard's blocks in `source` to a row of `target`."""
        target[rows] = source


@dataclass(frozen=True, slots=True)
class BlockPull:
    """A copy of all parts of a lease's blocks at `positions` to `local_block_ids`. deadline: by time.monotonic."""

    parts: Sequence[SourcePart]
    positions: Sequence[int]
    local_block_ids: Sequence[BlockId]
    deadline: float

    @property
    def seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)


# (shard, positions, blocks, rows, seconds): copies the shard's blocks at `positions` unchanged to `rows` of `blocks`,
# in at most `seconds`. Raises TransferError.
ReadBlocks = Callable[[PeerShard, Sequence[int], Blocks, Sequence[int], float], None]


def pull_parts(read: ReadBlocks, pull: BlockPull, blocks: Blocks) -> list[list[int]]:
    """Copy all parts to the rows of `blocks`; return the digests of the blocks read, by part."""
    return [part.pull(read, pull, blocks) for part in pull.parts]


class Reader(Protocol):
    """Fills one local pool by one transport. Opens connections and mappings as needed and keeps them until `close`.

    Several threads use it.
    """

    def pull(self, pull: BlockPull) -> list[list[int]]:
        """Copy blocks; return the digests of the blocks read, by part, which the caller verifies.

        Raises TransferError or UnavailableError. After a failure nothing writes to the local blocks any more, so
        another transport may fill them.
        """
        ...

    def close(self) -> None: ...


class LocalPool:
    """The pool of one rank of this worker: host memory of this process that peers on the host map read-only.

    The subclass for a pool in GPU memory has staging rows in host memory.
    """

    needs_staging = False  # whether leased blocks must be copied to `host_blocks` before peers can read them there

    def __init__(self, info: PoolInfo, socket_path: str, num_rows: int = 0) -> None:
        """socket_path: where the memory's descriptor is handed out. num_rows: number of staging rows; 0: no staging.

        Raises ConfigError if the machine does not have the memory.
        """
        self.info = info
        self.socket_path = socket_path
        self._host = replace(info, geometry=replace(info.geometry, num_blocks=num_rows or info.geometry.num_blocks))
        geometry = self._host.geometry
        self.fd = create_memfd("mini-infer-kv", geometry.pool_bytes)
        self.mapping = map_fd(self.fd, geometry.pool_bytes, writable=True)
        self.host_blocks = blocks_over(self.mapping, geometry.num_blocks, geometry.block_bytes)
        self._server: DescriptorServer | None = None

    def digests(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Compute the digests of complete blocks."""
        return digest_rows(self.host_blocks, block_ids)

    def fence(self, first: LocalPool) -> None:
        """Order the next loads after the steps launched so far by rank 0, whose pool is `first`."""

    def through_host(self, reader: Reader) -> Reader:
        """Turn a reader that fills rows of `host_blocks` into a reader that fills the pool."""
        return reader

    def serve(self) -> None:
        """Start handing out descriptors. Raises ConfigError if the socket cannot be used."""
        self._server = DescriptorServer(Path(self.socket_path), self._host, reopen_read_only(self.fd))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        os.close(self.fd)


class LeaseHolder(Protocol):
    """The engine's leases. Several threads call it."""

    def hold(self, lease_id: LeaseId, epoch: Epoch, positions: Sequence[int]) -> list[BlockId]:
        """Return the lease's blocks at `positions`, which stay allocated until `let_go`. Raises TransferError."""
        ...

    def let_go(self, lease_id: LeaseId) -> None: ...


class Transport:
    """One way to move blocks, for all pools of one worker. Subclasses override the methods that they need."""

    name: ClassVar[str]
    offered: ClassVar[Literal["always", "auto", "named"]] = "always"
    """When peers may read by it: always, unless --kv-transport names another, or only if it names this one."""
    needs: ClassVar[str] = ""
    """What a worker needs for a reader, for the error message if --kv-transport names the transport."""

    def __init__(self, host: str, token: str) -> None:
        """host: the address to listen on. token: the cluster's token, for calls from and to peers.

        Raises ConfigError if the transport cannot be used here.
        """
        self.host = host
        self.token = token

    def reader(self, pool: LocalPool, leases: LeaseClient) -> Reader | None:
        """Return a reader that fills the pool; None: not possible here. The caller closes `leases`."""
        raise NotImplementedError

    def export(self, pool: LocalPool) -> bytes | None:
        """Let peers read the pool; return its address for their readers; None: not offered.

        Called for one rank after the other, in order. Raises ConfigError.
        """
        raise NotImplementedError

    def describe(self) -> bytes:
        """Return data for peers that have the cluster's token. Called after all exports."""
        return b""

    def serve(self, leases: LeaseHolder) -> None:
        """Start to serve peers."""

    def close(self) -> None:
        """Stop everything that `export` and `serve` have started."""
