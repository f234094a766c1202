"""The KV layout of a model in which some layers have a window."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstore.layout import KvGroup, KvLayout

MAX_WINDOW_GROUPS = 8


def windowed_attention(windows: Sequence[int], num_kv_heads: int, head_dim: int, dtype: str) -> KvLayout:
    """Return the layout of a model whose layers look back `windows[layer]` tokens; 0: to the start.

    Layers of one window are divided into groups of equal size, the widest window first, and assigned to these in
    turn, so that consecutive layers, as in a pipeline stage, are spread over the groups.
    """
    by_window: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    ordered = sorted(by_window.items(), key=lambda item: item[0] or math.inf, reverse=True)
    size = _group_size([len(layers) for _, layers in ordered])
    groups = [
        KvGroup(
            "attention", "window" if window else "full", tuple(layers[first::count]), num_kv_heads, head_dim, dtype,
            window=window,
        )
        for window, layers in ordered
        for count in [-(-len(layers) // size)]
        for first in range(count)
    ]  # fmt: skip
    return KvLayout(tuple(groups))


def _group_size(counts: Sequence[int]) -> int:
    """Return the number of layers per group, if counts[i] layers have the i-th window, the widest first.

    Prefers at most MAX_WINDOW_GROUPS groups, then the least padding for the first window's layers, then for all, then
    the fewest groups.
    """

    def cost(size: int) -> tuple[bool, int, int, int]:
        paddings = [-count % size for count in counts]
        num_groups = sum(-(-count // size) for count in counts)
        return num_groups > MAX_WINDOW_GROUPS, paddings[0], sum(paddings), num_groups

    return min(range(1, max(counts) + 1), key=cost)
