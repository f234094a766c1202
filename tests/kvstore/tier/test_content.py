"""What blocks of a host's pools hold, by name."""

from __future__ import annotations

from dataclasses import replace

from kvstore.layout import PoolGeometry, Shard, full_attention, latent_attention
from kvstore.tier.content import content_name


def test_the_content_name_says_which_bytes_a_key_stands_for() -> None:
    whole = PoolGeometry(full_attention(3, 2, 8, "bfloat16"), 10, 16, "f")
    ranks = [replace(whole, shard=Shard(rank, 4)) for rank in range(4)]
    halves = [replace(whole, shard=Shard(rank, 2)) for rank in range(2)]
    others = [
        replace(whole, fingerprint="g"),
        replace(whole, block_size=32),
        replace(whole, layout=full_attention(3, 2, 8, "float16")),
    ]
    assert len({content_name(each) for each in (whole, *ranks, *halves, *others)}) == 1 + 2 + 3
    assert content_name(ranks[1]) == content_name(ranks[0]) == content_name(halves[0])  # the same head
    assert content_name(replace(whole, num_blocks=3)) == content_name(whole)


def test_every_rank_has_all_latents() -> None:
    whole = PoolGeometry(latent_attention(27, 576, "bfloat16"), 10, 64, "f")
    assert {content_name(replace(whole, shard=Shard(rank, 4))) for rank in range(4)} == {content_name(whole)}
