"""Which blocks a model with windows still reads, see `engine/kv_groups/block_groups.py`. Pure.

A layer with a window of w reads the keys of tokens t - w + 1 to t for the query of token t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.kv.manager import NO_BLOCK
from engine.kv_groups.block_groups import BlockGroups
from kvstore.layout import KvLayout
from kvstore.pool.block_hash import group_key
from kvstore.pool.block_pool import BlockPool
from kvstore.types import BlockId, BlockKey


@dataclass(frozen=True, slots=True)
class WindowedGroups(BlockGroups):
    """KV groups with or without windows. step_tokens: most tokens of one step."""

    step_tokens: int = 0

    @classmethod
    def of(cls, layout: KvLayout, block_size: int, step_tokens: int) -> WindowedGroups:
        return cls(block_size, tuple(group.window for group in layout.groups), step_tokens)

    @property
    def is_plain(self) -> bool:
        """See BlockGroups."""
        return self.windows == (0,)

    def first_live(self, window: int, num_computed: int) -> int:
        """See BlockGroups."""
        return max(num_computed - window + 1, 0) // self.block_size if window else 0

    def take_passed(self, table: list[BlockId], num_computed: int, has_gaps: bool = False) -> list[BlockId]:
        """See BlockGroups."""
        taken, count = [], self.num_groups
        for group, window in enumerate(self.windows):
            passed = range(group, min(self.first_live(window, num_computed) * count, len(table)), count)
            for entry in reversed(passed):
                if table[entry] != NO_BLOCK:
                    taken.append(table[entry])
                    table[entry] = NO_BLOCK
                elif not has_gaps:
                    break
        return taken[::-1]

    def live_entries(self, num_computed: int, num_tokens: int, first: int = 0) -> list[int]:
        """See BlockGroups."""
        starts = [max(self.first_live(window, num_computed), first) for window in self.windows]
        count = len(starts)
        return [
            position * count + group
            for position in range(min(starts), self.num_positions(num_tokens))
            for group, start in enumerate(starts)
            if position >= start
        ]

    def num_live(self, num_computed: int, num_tokens: int) -> int:
        """See BlockGroups."""
        num_positions = self.num_positions(num_tokens)
        return sum(max(num_positions - self.first_live(window, num_computed), 0) for window in self.windows)

    def most_live(self, num_tokens: int) -> int:
        """See BlockGroups."""
        num_positions = self.num_positions(num_tokens)
        return sum(min(num_positions, self._most_of(window, num_positions)) for window in self.windows)

    def longest(self, num_blocks: int) -> int | None:
        """See BlockGroups."""
        bounded = sum(self._most_of(window, 0) for window in self.windows if window)
        num_unbounded = self.windows.count(0)
        if not num_unbounded:
            if bounded <= num_blocks:
                return None
            return num_blocks // self.num_groups * self.block_size
        short = num_blocks // self.num_groups  # positions while no group has freed any
        long = max(num_blocks - bounded, 0) // num_unbounded
        return max(short, long) * self.block_size

    def cached_table(self, pool: BlockPool, keys: Sequence[BlockKey]) -> list[BlockId]:
        """See BlockGroups."""

        def has(position: int, group: int) -> bool:
            return pool.contains(group_key(keys[position], group))

        count = self.num_groups
        num_positions = self.longest_hit(len(keys), has)
        num_tokens = num_positions * self.block_size
        table = [NO_BLOCK] * (num_positions * count)
        for entry in self.live_entries(num_tokens, num_tokens):
            position, group = divmod(entry, count)
            [table[entry]] = pool.lookup([group_key(keys[position], group)])
        return table

    def longest_hit(self, num_positions: int, has: Callable[[int, int], bool]) -> int:
        """See BlockGroups."""
        runs = [0] * self.num_groups  # how many consecutive positions each group has, up to the current one
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
        """Return the most blocks of a group: from the first key of a step's first query to the step's last token."""
        return (window - 1 + self.step_tokens) // self.block_size + 2 if window else num_positions
