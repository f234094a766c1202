"""Pulls from shards with another split of heads or layers than the reader's.

Whole blocks of a source are read into scratch memory and the wanted parts copied from there, since a digest covers a
whole block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import TransferError
from kvstore.handle.handle import PeerShard
from kvstore.handle.head_split import are_of_one_worker, split_blocks
from kvstore.layout import HeadCopy, PoolGeometry
from kvstore.pool.digest import digest_blocks
from kvstore.transports.transport import BlockPull, Blocks, ReadBlocks, SourcePart

SCRATCH_BYTES = 8 << 20


def head_parts(mine: PoolGeometry, shards: Sequence[PeerShard]) -> list[SourcePart]:
    """What to read of which shard. Raises HandshakeError, see `split_blocks`, TransferError if shards are missing."""
    if not are_of_one_worker([shard.geometry for shard in shards]):
        raise TransferError("a KV handle whose shards are not all those of one worker")
    split = split_blocks(mine, tuple(shard.geometry.shard for shard in shards))
    return [
        SourcePart(shards[part.rank]) if part.copy is None else HeadPart(shards[part.rank], part.copy)
        for part in split
    ]


@dataclass(frozen=True, slots=True)
class HeadPart(SourcePart):
    """Some heads or layers of every block."""

    copy: HeadCopy

    def pull(self, read: ReadBlocks, pull: BlockPull, blocks: Blocks) -> list[int]:
        block_bytes = self.shard.geometry.block_bytes
        count = max(SCRATCH_BYTES // block_bytes, 1)
        scratch = np.empty((min(count, len(pull.positions)), block_bytes), dtype=np.uint8)
        digests: list[int] = []
        for first in range(0, len(pull.positions), count):
            some = pull.positions[first : first + count]
            read(self.shard, some, scratch, range(len(some)), pull.seconds_left)
            digests += digest_blocks(scratch[: len(some)])
            self.put(scratch[: len(some)], blocks, pull.local_block_ids[first : first + count])
        return digests

    def put(self, source: Blocks, target: Blocks, rows: Sequence[int]) -> None:
        copy = self.copy
        for block, row in zip(source, rows, strict=True):
            from_ = self._ranges(block, copy.source_offset, copy.source_pitch)
            self._ranges(target[row], copy.target_offset, copy.target_pitch)[:] = from_

    def _ranges(self, block: Blocks, offset: int, pitch: int) -> Blocks:
        """Return a view of the bytes of a block to copy, (height, width)."""
        first, column = divmod(offset, pitch)
        return block.reshape(-1, pitch)[first : first + self.copy.height, column : column + self.copy.width]
