"""Layouts: of a model, a rank's shard of it, and those that no pool supports yet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.errors import ConfigError, UnsupportedModelError
from kvstore.layout import KvGroup, KvLayout, PoolGeometry, Shard, full_attention, latent_attention

FULL = KvGroup("attention", "full", (0, 1, 2), 4, 8, "bfloat16")
WINDOW = replace(FULL, name="local", kind="window", window=512, layers=(3, 4))
LATENT = KvGroup("mla", "latent", tuple(range(27)), 1, 576, "bfloat16", num_planes=1)


def test_the_geometry_is_layout_times_blocks_times_shard() -> None:
    geometry = PoolGeometry(full_attention(3, 4, 8, "bfloat16"), 10, 16, "f")
    assert geometry.block_shape == (3, 2, 4, 16, 8)
    assert geometry.block_bytes == 16 * 3 * 2 * 4 * 8 * 2
    assert geometry.pool_bytes == 10 * geometry.block_bytes
    half = replace(geometry, shard=Shard(1, 2))
    assert (half.block_shape, half.heads) == ((3, 2, 2, 16, 8), range(2, 4))
    assert half.block_bytes * 2 == geometry.block_bytes


def test_every_rank_has_all_latents() -> None:
    whole = PoolGeometry(latent_attention(27, 576, "bfloat16"), 10, 64, "f")
    assert whole.block_shape == (27, 1, 1, 64, 576)
    assert whole.block_bytes == 64 * 27 * 576 * 2
    ranks = [replace(whole, shard=Shard(rank, 4)) for rank in range(4)]
    assert {rank.block_shape for rank in ranks} == {whole.block_shape}


@pytest.mark.parametrize(
    ("num_heads", "size", "expected"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
    ],
)
def test_heads_of_ranks(num_heads: int, size: int, expected: list[list[int]]) -> None:
    assert [list(Shard(rank, size).heads(num_heads)) for rank in range(size)] == expected


@pytest.mark.parametrize(
    ("shard", "num_heads"), [(Shard(0, 3), 4), (Shard(0, 6), 4), (Shard(2, 2), 4), (Shard(-1, 1), 1)]
)
def test_impossible_shards(shard: Shard, num_heads: int) -> None:
    with pytest.raises(ConfigError):
        PoolGeometry(full_attention(1, num_heads, 8, "float32"), 1, 16, "f", shard)


@pytest.mark.parametrize(
    "groups",
    [
        (FULL, replace(WINDOW, num_kv_heads=2)),
        (FULL, replace(WINDOW, dtype="float16")),
        (FULL, LATENT),
        (replace(FULL, num_planes=1),),
        (replace(LATENT, num_planes=2),),
        (),
    ],
)
def test_what_no_pool_serves_can_be_declared_and_is_refused(groups: tuple[KvGroup, ...]) -> None:
    layout = KvLayout(groups)
    with pytest.raises(UnsupportedModelError, match="not supported yet"):
        PoolGeometry(layout, 1, 16, "f")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"}, {"dtype": "complex128"}, {"layers": ()}, {"layers": (1, 0)}, {"layers": (-1, 0)},
        {"num_kv_heads": 0}, {"head_dim": 2**32}, {"num_planes": 0}, {"window": 5}, {"kind": "window"},
    ],
)  # fmt: skip
def test_impossible_groups(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="attention"):
        replace(FULL, **change)


def test_a_layout_says_what_it_is() -> None:
    assert str(KvLayout((FULL, WINDOW))) == (
        "full: 3 layers x 2 x 4 heads x 8 bfloat16; window of 512: 2 layers x 2 x 4 heads x 8 bfloat16"
    )
