"""Re-splits KV heads and layers: the bytes of the writer's shards that a reader with another split needs. Pure.

With h heads in a shard, one block of it is layers x planes rows of h pieces, a piece being one head's block_size x
head_dim elements. So consecutive heads are one byte range in every row, at a constant distance: a two-dimensional
copy, with a pitch on both sides, of the rows of consecutive layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from common.errors import HandshakeError
from kvstore.layout import DTYPE_BYTES, HeadCopy, PoolGeometry, Shard


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The part of each block of the writer's `rank` that a reader takes; without `copy` the unchanged block."""

    rank: int
    copy: HeadCopy | None


def are_of_one_worker(geometries: Sequence[PoolGeometry]) -> bool:
    """Whether these pools are alike, and of stages with each layer once, in any order, with all ranks in order."""
    first = geometries[0]
    num_layers = first.layout.num_layers
    stages: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for geometry in geometries:
        shard = geometry.shard
        if not geometry.has_blocks_of(replace(first, shard=shard)):
            return False
        stages.setdefault(shard.layers or (0, num_layers), []).append((shard.rank, shard.size))
    size = len(geometries) // len(stages)
    starts, stops = zip(*sorted(stages), strict=True)
    return (
        all(ranks == [(rank, size) for rank in range(size)] for ranks in stages.values())
        and starts == (0, *stops[:-1])
        and stops[-1] == num_layers
    )


@lru_cache(maxsize=64)
def split_blocks(mine: PoolGeometry, shards: tuple[Shard, ...]) -> tuple[ShardPart, ...]:
    """Return the parts that form a block of `mine`, if the writer has divided the same layout into `shards`.

    Raises HandshakeError for blocks of several groups with other layers: a layer's place in them depends on its
    group.
    """
    parts: list[ShardPart] = []
    stages: dict[tuple[int, int] | None, list[int]] = {}
    for index, shard in enumerate(shards):
        stages.setdefault(shard.layers, []).append(index)
    for peers in stages.values():
        for rank, heads in _split_heads(mine, len(peers)):
            theirs = replace(mine, shard=shards[peers[rank]])
            layers = range(max(theirs.layers.start, mine.layers.start), min(theirs.layers.stop, mine.layers.stop))
            if layers and len(mine.layout.groups) > 1 and theirs.layers != mine.layers:
                raise HandshakeError("KV of several groups is not read from other stages: give both workers one --pp")
            if layers:
                parts.append(ShardPart(peers[rank], _copy(mine, theirs, layers, heads)))
    return tuple(parts)


def _split_heads(mine: PoolGeometry, num_ranks: int) -> list[tuple[int, range]]:
    """Return which of `num_ranks` writers provides which heads of `mine`.

    A head that several ranks hold is read from one of them; readers' ranks take turns among them.
    """
    wanted = mine.heads
    found: list[tuple[int, range]] = []
    num_kv_heads = mine.group.num_kv_heads
    held = [Shard(rank, num_ranks).heads(num_kv_heads) for rank in range(num_ranks)]
    head = wanted.start
    while head < wanted.stop:
        ranks = [rank for rank, heads in enumerate(held) if head in heads]
        rank = ranks[mine.shard.rank % len(ranks)]
        stop = min(held[rank].stop, wanted.stop)
        found.append((rank, range(head, stop)))
        head = stop
    return found


def _copy(mine: PoolGeometry, theirs: PoolGeometry, layers: range, heads: range) -> HeadCopy | None:
    """Return the copy of these layers' heads; None if both sides hold exactly these."""
    if theirs.layers == mine.layers and theirs.heads == mine.heads:
        return None
    group = mine.group
    num_layers = mine.block_layers if layers == mine.layers else len(layers)
    piece, rows = mine.block_size * group.head_dim * DTYPE_BYTES[group.dtype], num_layers * group.num_planes

    def place_in(pool: PoolGeometry) -> tuple[int, int]:
        row = len(pool.heads) * piece
        skipped = (layers.start - pool.layers.start) * group.num_planes
        return skipped * row + (heads.start - pool.heads.start) * piece, row

    (source, source_pitch), (target, target_pitch) = place_in(theirs), place_in(mine)
    if theirs.heads == mine.heads:  # one range of bytes on both sides
        return HeadCopy(1, rows * source_pitch, source, theirs.block_bytes, target, mine.block_bytes)
    return HeadCopy(rows, len(heads) * piece, source, source_pitch, target, target_pitch)
