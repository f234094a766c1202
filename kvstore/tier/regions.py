"""The agent's host memory: one region per kind of block, within one budget.

Blocks of different models never share a key (keys contain the model's fingerprint), but blocks of two ranks do,
although they hold different heads. So each (content_name, block_bytes) has its own region: a memfd and its slots'
states. Ranks with the same heads have the same `content_name` and share a region. A region is created when its first
worker connects and outlives its workers; the one idle for longest is dropped when another needs room.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Iterator

from common.errors import OverloadedError
from kvstore.tier.host_tier import HostTierAllocator
from kvstore.tier.key_filter import KeyFilter, num_cells
from kvstore.transports.shared_memory import create_memfd, map_fd

logger = logging.getLogger(__name__)
RegionName = tuple[str, int]  # content_name, block_bytes


class Region:
    """Slots and memory for blocks of one kind."""

    def __init__(self, name: RegionName, num_slots: int) -> None:
        """Raise ConfigError if the memory is not available."""
        self.name = name
        self.block_bytes = name[1]
        num_bytes = num_slots * self.block_bytes + num_cells(num_slots)
        self.fd = create_memfd("mini-infer-tier", num_bytes)
        self.buffer: mmap.mmap = map_fd(self.fd, num_bytes, writable=True)
        self._filter = KeyFilter(self.buffer, num_slots, self.block_bytes)
        self.tier = HostTierAllocator(num_slots, self._filter.count)
        self.num_users = 0
        self.last_use = 0  # order of openings

    @property
    def num_bytes(self) -> int:
        return self.tier.num_slots * self.block_bytes

    def close(self) -> None:
        self._filter.close()
        with contextlib.suppress(BufferError):
            self.buffer.close()
        os.close(self.fd)


class Regions:
    """All regions of one agent, with at most `budget_bytes` in total."""

    def __init__(self, budget_bytes: int, region_bytes: int = 0) -> None:
        """region_bytes: limit of one region; 0: only the budget limits it."""
        self._budget_bytes = budget_bytes
        self._region_bytes = region_bytes or budget_bytes
        self._regions: dict[RegionName, Region] = {}
        self._openings = 0

    @property
    def used_bytes(self) -> int:
        return sum(region.num_bytes for region in self._regions.values())

    def all(self) -> list[Region]:
        return list(self._regions.values())

    @contextlib.contextmanager
    def using(self, content_name: str, block_bytes: int) -> Iterator[Region]:
        """Yield the region for such blocks, created on first use and kept at least until the end of the context.

        Raises OverloadedError if regions in use take the whole budget, ConfigError without the memory.
        """
        region = self._regions.get((content_name, block_bytes)) or self._create((content_name, block_bytes))
        region.num_users += 1
        self._openings += 1
        region.last_use = self._openings
        try:
            yield region
        finally:
            region.num_users -= 1

    def close(self) -> None:
        for region in self._regions.values():
            region.close()
        self._regions.clear()

    def _create(self, name: RegionName) -> Region:
        block_bytes = name[1]
        wanted = min(self._region_bytes, self._budget_bytes)
        idle = sorted((r for r in self._regions.values() if not r.num_users), key=lambda r: r.last_use)
        while idle and self._budget_bytes - self.used_bytes < wanted:
            dropped = idle.pop(0)
            logger.info("dropping %d cached blocks of a model without workers", dropped.tier.num_cached)
            del self._regions[dropped.name]
            dropped.close()
        num_slots = min(wanted, self._budget_bytes - self.used_bytes) // block_bytes
        if num_slots < 1:
            raise OverloadedError(
                "other models or ranks use the whole host tier: raise --host-tier-gb or set --region-gb"
            )
        region = self._regions[name] = Region(name, num_slots)
        return region
