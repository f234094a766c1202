"""Prefixes of requests as far as a host tier has them."""

from __future__ import annotations

from engine.kv.manager import NO_BLOCK
from engine.kv_groups.block_groups import BlockGroups
from engine.request import Request
from kvstore.pool.block_hash import group_key
from kvstore.tier.host_tier import HostTier
from kvstore.types import HostSlot


def find_on_host(
    tier: HostTier, groups: BlockGroups, request: Request, first: int, last: int
) -> tuple[int, dict[int, HostSlot]]:
    """How far `tier` continues the prefix from position `first` on, at most to `last`.

    Returns the position after it and, by entry, the pinned slots of what queries after it read.
    """
    if groups.is_plain:
        slots = tier.lookup(request.block_keys[first:last])
        return first + len(slots), dict(enumerate(slots, first))
    count = groups.num_groups
    places = {entry: divmod(entry, count) for entry in range(first * count, last * count)}
    keys = {entry: group_key(request.block_keys[position], group) for entry, (position, group) in places.items()}
    missing = set(tier.missing(list(keys.values())))

    def has(position: int, group: int) -> bool:
        entry = position * count + group
        return keys[entry] not in missing if entry in keys else request.block_ids[entry] != NO_BLOCK

    last = groups.longest_hit(last, has)
    if last <= first:
        return first, {}
    entries = groups.live_entries(last * groups.block_size, last * groups.block_size, first)
    slots = tier.lookup([keys[entry] for entry in entries])
    if len(slots) < len(entries):  # others have evicted some since
        tier.unpin(slots)
        return first, {}
    return last, dict(zip(entries, slots, strict=True))
