"""What is pulled from a peer, and how it gets into rows of host memory, for every transport that reads through that.

Where shards are equal, blocks go straight to their rows; `head_parts.py` is for those that are divided otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.handle.copies import HeadCopy
from kvstore.handle.handle import PeerShard
from kvstore.pool.digest import digest_rows
from kvstore.types import BlockId

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
