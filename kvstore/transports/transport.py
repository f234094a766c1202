"""What a transport is: one way to move blocks from a pool of one worker into a pool of another.

A pull goes from parts of a lease's shards (`SourcePart`) to blocks of a pool (`LocalPool`). Where shards are equal,
blocks go straight to their rows; `head_parts.py` is for those that are divided otherwise.

A transport is a folder, `kvstore/transports/<name>/` or one of the worker where it needs torch, and a line of
`worker/config.py`; `shm.py` is the one that is always there. Nobody else knows a transport's name; its addresses
travel in KV handles as bytes that only it reads.
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
    """Part of every block of one of a lease's shards; without `copy` the whole block, unchanged."""

    shard: PeerShard
    copy: HeadCopy | None = None

    def pull(self, read: ReadBlocks, pull: BlockPull, blocks: Blocks) -> list[int]:
        """Copy the part to rows of `blocks`; return the digests of what was read."""
        read(self.shard, pull.positions, blocks, pull.local_block_ids, pull.seconds_left)
        return digest_rows(blocks, pull.local_block_ids)

    def put(self, source: Blocks, target: Blocks, rows: Sequence[int]) -> None:
        """Copy the part of each block of the shard in `source` to a row of `target`."""
        target[rows] = source


@dataclass(frozen=True, slots=True)
class BlockPull:
    """Copy all parts of a lease's blocks at `positions` to `local_block_ids`, until `deadline` (time.monotonic)."""

    parts: Sequence[SourcePart]
    positions: Sequence[int]
    local_block_ids: Sequence[BlockId]
    deadline: float

    @property
    def seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)


# (shard, positions, blocks, rows, seconds): copies the shard's blocks at `positions`, as they are, to those rows of
# `blocks`, within so many seconds. Raises TransferError.
ReadBlocks = Callable[[PeerShard, Sequence[int], Blocks, Sequence[int], float], None]


def pull_parts(read: ReadBlocks, pull: BlockPull, blocks: Blocks) -> list[list[int]]:
    """Copy all parts to the rows of `blocks`; return the digests of what was read, by part."""
    return [part.pull(read, pull, blocks) for part in pull.parts]


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


class LocalPool:
    """The pool of one rank of this worker: host memory of this process that peers of the host map, read-only.

    A pool in GPU memory is one, too, with rows of host memory in front of it.
    """

    needs_staging = False  # whether `host_blocks` hold leased blocks only after these were copied there

    def __init__(self, info: PoolInfo, socket_path: str, num_rows: int = 0) -> None:
        """socket_path: hands out a descriptor of the memory. num_rows: of the memory, if it is not the pool itself.

        Raises ConfigError when there is no memory.
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
        """Digests of complete blocks."""
        return digest_rows(self.host_blocks, block_ids)

    def fence(self, first: LocalPool) -> None:
        """Mark that blocks are about to be given to loads, after the steps that rank 0, `first`, has launched."""

    def through_host(self, reader: Reader) -> Reader:
        """A reader into the pool, made of one that fills rows of `host_blocks`."""
        return reader

    def serve(self) -> None:
        """Start handing out descriptors. Raises ConfigError when a socket cannot be made."""
        self._server = DescriptorServer(Path(self.socket_path), self._host, reopen_read_only(self.fd))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        os.close(self.fd)


class LeaseHolder(Protocol):
    """The engine's leases. Called from several threads."""

    def hold(self, lease_id: LeaseId, epoch: Epoch, positions: Sequence[int]) -> list[BlockId]:
        """The lease's blocks at `positions`, which stay its own until `let_go`. Raises TransferError."""
        ...

    def let_go(self, lease_id: LeaseId) -> None: ...


class Transport:
    """One way to move blocks, for all pools of one worker. What a transport has no use for it inherits."""

    name: ClassVar[str]
    offered: ClassVar[Literal["always", "auto", "named"]] = "always"
    """When peers may read by it: always, unless another one is named, or only when it is named itself."""
    needs: ClassVar[str] = ""
    """What a worker without a reader lacks, for the message to who has named it."""

    def __init__(self, host: str, token: str) -> None:
        """host: to listen on. token: that peers must show, and are shown.

        Raise ConfigError when it cannot be used here.
        """
        self.host = host
        self.token = token

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
