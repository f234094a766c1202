"""Which blocks of a sequence a model with KV groups still reads, and how many it can come to hold. Pure.

A table lists blocks position by position, position p being the tokens from p * block_size on, and at each position
one block per group: entry p * num_groups + g is group g's; NO_BLOCK, if no later query reads it. What none reads
goes back when a request takes its next blocks, so that nothing is done per token. See
docs/decisions/kv-blocks-and-groups.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.pool.block_pool import BlockPool
from kvstore.types import BlockId, BlockKey


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """One group, all of whose blocks are read until the sequence ends. Models with windows have others.

    windows: of each group in tokens, those without one first; 0: none.
    """

    block_size: int
    windows: tuple[int, ...] = (0,)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def is_plain(self) -> bool:
        """Whether tables are plain lists of blocks, all of which are read until the sequence ends."""
        return True

    def num_positions(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_live(self, window: int, num_computed: int) -> int:
        """The first position that the query of token `num_computed` and later ones read."""
        return 0

    def take_passed(self, table: list[BlockId], num_computed: int, has_gaps: bool = False) -> list[BlockId]:
        """Take the blocks from a table that no query from token `num_computed` on reads, in the table's order.

        has_gaps: look also before entries without a block, as loads may leave them.
        """
        return []

    def live_entries(self, num_computed: int, num_tokens: int, first: int = 0) -> list[int]:
        """Entries of a table for `num_tokens` that queries from token `num_computed` on read.

        first: leave out positions before it.
        """
        return list(range(first, self.num_positions(num_tokens)))

    def num_live(self, num_computed: int, num_tokens: int) -> int:
        """Number of `live_entries`."""
        return self.num_positions(num_tokens)

    def most_live(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at any time on its way there."""
        return self.num_positions(num_tokens)

    def longest(self, num_blocks: int) -> int | None:
        """Tokens of the longest sequence that so many blocks hold, 0 when not even a window; None: any."""
        return num_blocks * self.block_size

    def longest_hit(self, num_positions: int, has: Callable[[int, int], bool]) -> int:
        """Positions of the longest prefix, at most `num_positions`, of which all groups have what is live after it.

        has: whether a position has a block of a group.
        """
        return next((position for position in range(num_positions) if not has(position, 0)), num_positions)

    def cached_table(self, pool: BlockPool, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Table of the longest prefix that `pool` has and all groups can continue. keys: of a sequence's blocks."""
        return pool.lookup(keys)


def group_table(block_ids: Sequence[BlockId], group: int, num_groups: int, first: int, last: int) -> list[BlockId]:
    """Blocks of one group at positions `first` to before `last`."""
    return list(block_ids[first * num_groups + group : last * num_groups : num_groups])
