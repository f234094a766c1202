"""Parts of prompts that are worth a lease while the prompt is being computed."""

from __future__ import annotations

from engine.kv.manager import KVManager
from engine.kv_groups.block_groups import group_table
from engine.kv_groups.manager import GroupedKVManager
from engine.request import Request
from kvstore.types import BlockId


def part_blocks(kv: KVManager, request: Request, first: int, last: int) -> list[BlockId]:
    """Blocks at positions `first` to before `last`.

    Those of the one group without a window: others may go before the prompt is computed.
    """
    if not isinstance(kv, GroupedKVManager):
        return request.block_ids[first:last]
    if kv.groups.windows.count(0) != 1:
        return []
    return group_table(request.block_ids, 0, kv.blocks_per_position, first, last)


def are_first(kv: KVManager) -> bool:
    """Whether parts of a prompt are the first blocks of its whole lease."""
    return not isinstance(kv, GroupedKVManager) or kv.groups.is_plain
