"""KV groups of models with windows."""

from __future__ import annotations

import math

import pytest

from engine.windows.layout import windowed_attention
from kvstore.layout import PoolGeometry


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([4096] * 32, [32]),  # Mistral-v0.1
        ([128, 0] * 12, [12, 12]),  # gpt-oss-20b
        ([*[1024] * 5, 0] * 5 + [1024] * 4, [5, *[5] * 5, 4]),  # Gemma-3-4b
        ([*[1024] * 5, 0] * 10 + [1024] * 2, [10, 9, 9, 9, 9, 8, 8]),  # Gemma-3-27b
        ([0] + [64] * 39, [1, 6, 6, 6, 6, 5, 5, 5]),  # padded where it must be
        ([0, 64, 32], [1, 1, 1]),
    ],
)
def test_layers_of_one_window_are_cut_into_groups_of_one_size(windows: list[int], sizes: list[int]) -> None:
    layout = windowed_attention(windows, 4, 8, "bfloat16")
    assert [len(group.layers) for group in layout.groups] == sizes
    reach = [group.window or math.inf for group in layout.groups]
    assert reach == sorted(reach, reverse=True)
    for layer, window in enumerate(windows):
        assert [group.window for group in layout.groups if layer in group.layers] == [window]
    geometry = PoolGeometry(layout, 10, 16, "f")
    assert geometry.block_shape == (max(sizes), 2, 4, 16, 8)
    assert layout.has_windows
