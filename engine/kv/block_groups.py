"""Which blocks of a sequence a model with KV groups still reads, and how many it can come to hold. Pure.

A table lists blocks position by position, position p being the tokens from p * block_size on, and at each position
one block per group: entry p * num_groups + g is group g's. With one group that is a plain list of blocks. A layer
with a window of w reads, for the query of token t, the keys of tokens t - w + 1 to t. See
docs/decisions/kv-blocks-and-groups.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.layout import KvLayout
from kvstore.types import BlockId

NO_BLOCK = BlockId(-1)  # an entry that no later query reads


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """windows: of each group in tokens, those without one first; 0: none. step_tokens: most tokens of one step."""

    block_size: int
    windows: tuple[int, ...]
    step_tokens: int

    @classmethod
    def of(cls, layout: KvLayout, block_size: int, step_tokens: int) -> BlockGroups:
        return cls(block_size, tuple(group.window for group in layout.groups), step_tokens)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def is_plain(self) -> bool:
        """Whether tables are plain lists of blocks, all of which are read until the sequence ends."""
        return self.windows == (0,)

    def num_positions(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_entries(self, num_tokens: int) -> int:
        return self.num_positions(num_tokens) * self.num_groups

    def first_live(self, window: int, num_computed: int) -> int:
        """The first position that the query of token `num_computed` and later ones read."""
        return max(num_computed - window + 1, 0) // self.block_size if window else 0

    def live_entries(self, num_computed: int, num_tokens: int, first: int = 0) -> list[int]:
        """Entries of a table for `num_tokens` that queries from token `num_computed` on read.

        first: leave out positions before it.
        """
        if self.is_plain:
            return list(range(first, self.num_positions(num_tokens)))
        starts = [max(self.first_live(window, num_computed), first) for window in self.windows]
        count = len(starts)
        return [
            position * count + group
            for position in range(min(starts), self.num_positions(num_tokens))
            for group, start in enumerate(starts)
            if position >= start
        ]

    def num_live(self, num_computed: int, num_tokens: int) -> int:
        """Number of `live_entries`."""
        num_positions = self.num_positions(num_tokens)
        return sum(max(num_positions - self.first_live(window, num_computed), 0) for window in self.windows)

    def most_live(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at any time on its way there."""
        num_positions = self.num_positions(num_tokens)
        return sum(min(num_positions, self._most_of(window, num_positions)) for window in self.windows)

    def longest(self, num_blocks: int) -> int | None:
        """Tokens of the longest sequence that so many blocks hold, 0 when not even a window; None: any."""
        bounded = sum(self._most_of(window, 0) for window in self.windows if window)
        num_unbounded = self.windows.count(0)
        if not num_unbounded:
            if bounded <= num_blocks:
                return None
            return num_blocks // self.num_groups * self.block_size
        short = num_blocks // self.num_groups  # positions while no group has left any behind
        long = max(num_blocks - bounded, 0) // num_unbounded
        return max(short, long) * self.block_size

    def longest_hit(self, num_positions: int, has: Callable[[int, int], bool]) -> int:
        """Positions of the longest prefix, at most `num_positions`, of which all groups have what is live behind it.

        has: whether a position has a block of a group.
        """
        runs = [0] * self.num_groups  # how many positions in a row each group has, up to the last one looked at
        longest = 0
        for position in range(num_positions):
            for group, window in enumerate(self.windows):
                if has(position, group):
                    runs[group] += 1
                elif window:
                    runs[group] = 0
                else:
                    return longest
            count = position + 1
            needed = (count - self.first_live(window, count * self.block_size) for window in self.windows)
            if all(run >= least for run, least in zip(runs, needed, strict=True)):
                longest = count
        return longest

    def _most_of(self, window: int, num_positions: int) -> int:
        """Most blocks of one group: from the first key of a step's first query to the step's last token."""
        return (window - 1 + self.step_tokens) // self.block_size + 2 if window else num_positions


def group_table(block_ids: Sequence[BlockId], group: int, num_groups: int, first: int, last: int) -> list[BlockId]:
    """Blocks of one group at positions `first` to before `last`."""
    return list(block_ids[first * num_groups + group : last * num_groups : num_groups])
