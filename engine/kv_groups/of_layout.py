"""The KV groups of a model."""

from __future__ import annotations

from engine.kv_groups.block_groups import BlockGroups
from kvstore.layout import KvLayout


def block_groups(layout: KvLayout, block_size: int, step_tokens: int) -> BlockGroups:
    """Which blocks of a sequence a model with this layout reads. step_tokens: most tokens of one step."""
    if not layout.has_windows:
        return BlockGroups(block_size)
    from engine.windows.block_groups import WindowedGroups

    return WindowedGroups.of(layout, block_size, step_tokens)
