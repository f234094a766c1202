"""Re-split of KV heads: which bytes of which shards a reader of another TP degree than the writer needs. Pure.

With h heads in a shard, one block of it is layers x planes rows of h pieces, a piece being one head's block_size x
head_dim elements. So consecutive heads are one range of bytes in every row, and the ranges are evenly spaced: a copy
in two dimensions, with a pitch on either side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from common.errors import HandshakeError
from kvstore.layout import PoolGeometry, Shard


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """Bytes from one block to another, for i below `height`:

    target[i * target_pitch + target_offset :][:width] = source[i * source_pitch + source_offset :][:width]
    """

    height: int
    width: int
    source_offset: int
    source_pitch: int
    target_offset: int
    target_pitch: int


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Part of every block of the writer's `rank` that a reader takes; without `copy` the whole block, unchanged."""

    rank: int
    copy: HeadCopy | None


@lru_cache(maxsize=64)
def split_heads(mine: PoolGeometry, num_ranks: int) -> tuple[ShardPart, ...]:
    """The parts that make up a block of `mine`, when the same layout is divided among `num_ranks` by the writer.

    Of a head that several ranks hold one copy is read; readers' ranks take turns, so that all of them serve. Raises
    HandshakeError for a pool of some layers.
    """
    if mine.shard.layers is not None:
        raise HandshakeError("a pipeline's stages cannot read KV of peers yet")
    wanted = mine.heads
    parts: list[ShardPart] = []
    num_kv_heads = mine.group.num_kv_heads
    held = [Shard(rank, num_ranks).heads(num_kv_heads) for rank in range(num_ranks)]
    head = wanted.start
    while head < wanted.stop:
        ranks = [rank for rank, heads in enumerate(held) if head in heads]
        rank = ranks[mine.shard.rank % len(ranks)]
        stop = min(held[rank].stop, wanted.stop)
        parts.append(ShardPart(rank, _copy(mine, held[rank], range(head, stop))))
        head = stop
    return tuple(parts)


def _copy(mine: PoolGeometry, held: range, heads: range) -> HeadCopy | None:
    """The copy of `heads` from a shard that holds `held`; None when that is all on both sides."""
    if held == mine.heads:
        return None
    group = mine.group
    piece = mine.block_size * group.head_bytes
    return HeadCopy(
        height=len(group.layers) * group.num_planes,
        width=len(heads) * piece,
        source_offset=(heads.start - held.start) * piece,
        source_pitch=len(held) * piece,
        target_offset=(heads.start - mine.heads.start) * piece,
        target_pitch=len(mine.heads) * piece,
    )
