"""Copy parts of shards into rows of host memory, for every transport that reads through the host.

Where shards are equal, blocks go straight to their rows. Where heads or layers are divided otherwise, whole blocks of
a source are read into a scratch area, and what is wanted is copied from there: a digest is of a whole block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.handle.copies import HeadCopy
from kvstore.handle.handle import PeerShard
from kvstore.pool.digest import digest_blocks, digest_rows
from kvstore.types import BlockId

SCRATCH_BYTES = 8 << 20
Blocks = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]
Block = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SourcePart:
    """Part of every block of one of a lease's shards; without `copy` the whole block, unchanged."""

    shard: PeerShard
    copy: HeadCopy | None = None


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
    digests: list[list[int]] = []
    for part in pull.parts:
        if part.copy is not None:
            digests.append(_pull_heads(read, part.shard, part.copy, pull, blocks))
            continue
        read(part.shard, pull.positions, blocks, pull.local_block_ids, pull.seconds_left)
        digests.append(digest_rows(blocks, pull.local_block_ids))
    return digests


def _pull_heads(read: ReadBlocks, shard: PeerShard, copy: HeadCopy, pull: BlockPull, blocks: Blocks) -> list[int]:
    block_bytes = shard.geometry.block_bytes
    count = max(SCRATCH_BYTES // block_bytes, 1)
    scratch = np.empty((min(count, len(pull.positions)), block_bytes), dtype=np.uint8)
    digests: list[int] = []
    for first in range(0, len(pull.positions), count):
        some = pull.positions[first : first + count]
        read(shard, some, scratch, range(len(some)), pull.seconds_left)
        digests += digest_blocks(scratch[: len(some)])
        copy_heads(copy, scratch[: len(some)], blocks, pull.local_block_ids[first : first + count])
    return digests


def copy_heads(copy: HeadCopy, source: Blocks, target: Blocks, rows: Sequence[int]) -> None:
    """Copy from each block of `source` to the block of `target` in the same place of `rows`."""
    for block, row in zip(source, rows, strict=True):
        from_ = _ranges(block, copy, copy.source_offset, copy.source_pitch)
        _ranges(target[row], copy, copy.target_offset, copy.target_pitch)[:] = from_


def _ranges(block: Block, copy: HeadCopy, offset: int, pitch: int) -> Block:
    """The bytes that are copied from or to a block, (height, width), as a view."""
    first, column = divmod(offset, pitch)
    return block.reshape(-1, pitch)[first : first + copy.height, column : column + copy.width]
