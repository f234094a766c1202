"""Re-split of KV heads and layers: which bytes of which shards a reader needs that is divided otherwise. Pure.

With h heads in a shard, one block of it is layers x planes rows of h pieces, a piece being one head's block_size x
head_dim elements. So consecutive heads are one range of bytes in every row, and the ranges are evenly spaced: a copy
in two dimensions, with a pitch on either side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
def split_blocks(mine: PoolGeometry, shards: tuple[Shard, ...]) -> tuple[ShardPart, ...]:
    """The parts that make up a block of `mine`, when the writer has divided the same layout into `shards`.

    Raises HandshakeError where one side divides layers and the other one heads.
    """
    if mine.shard.layers is None and all(shard.layers is None for shard in shards):
        return split_heads(mine, len(shards))
    if any(shard.size > 1 for shard in (mine.shard, *shards)):
        raise HandshakeError("KV is not read between a worker of --tp and one of --pp: give both the same flag")
    parts = []
    for rank, shard in enumerate(shards):
        theirs = replace(mine, shard=shard)
        if theirs.layers == mine.layers:
            return (ShardPart(rank, None),)
        first, stop = max(theirs.layers.start, mine.layers.start), min(theirs.layers.stop, mine.layers.stop)
        if first < stop:
            parts.append(ShardPart(rank, _copy_of_layers(mine, theirs, range(first, stop))))
    return tuple(parts)


def _copy_of_layers(mine: PoolGeometry, theirs: PoolGeometry, layers: range) -> HeadCopy:
    """The copy of all heads of some layers: one range of bytes on both sides."""
    each = mine.layer_bytes
    return HeadCopy(
        height=1,
        width=len(layers) * each,
        source_offset=(layers.start - theirs.layers.start) * each,
        source_pitch=theirs.block_bytes,
        target_offset=(layers.start - mine.layers.start) * each,
        target_pitch=mine.block_bytes,
    )


@lru_cache(maxsize=64)
def split_heads(mine: PoolGeometry, num_ranks: int) -> tuple[ShardPart, ...]:
    """The parts that make up a block of `mine`, when the same layout is divided among `num_ranks` by the writer.

    Of a head that several ranks hold one copy is read; readers' ranks take turns, so that all of them serve.
    """
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
