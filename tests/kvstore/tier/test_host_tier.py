"""The host tier's allocator against a plain model of it, and the tier of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import ConfigError
from common.token_ids import pack_ids
from kvstore.layout import PoolGeometry, Shard, full_attention, latent_attention
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.tier.content import content_name
from kvstore.tier.host_tier import HostTier, HostTierAllocator, LocalHostTier
from kvstore.types import BlockId, BlockKey, HostSlot

KEYS = block_keys(root_key("model"), pack_ids(range(8)), 1)


def test_unkeyed_and_uncommitted_slots_become_free() -> None:
    tier = HostTierAllocator(2)
    slots = tier.reserve([None, KEYS[0]])
    assert slots is not None
    tier.commit(slots[:1])
    tier.unpin(slots)
    assert tier.num_free == 2
    assert tier.missing(KEYS[:1]) == KEYS[:1]
    tier.check_integrity()


def test_two_writers_of_one_key_keep_the_first() -> None:
    tier = HostTierAllocator(2)
    first, second = tier.reserve(KEYS[:1]), tier.reserve(KEYS[:1])
    assert first is not None
    assert second is not None
    tier.commit(second)
    tier.commit(first)
    tier.unpin(first)
    tier.unpin(second)
    assert tier.lookup(KEYS[:1]) == second
    assert tier.num_free == 1


def test_local_tier_is_a_host_tier() -> None:
    tier: HostTier = LocalHostTier(2, 4096)
    assert tier.num_slots == 2
    assert len(tier.buffer) == 8192
    tier.buffer[4096:4100] = b"abcd"
    view = memoryview(tier.buffer)
    tier.close()  # a view is alive: nothing happens to it
    assert bytes(view[4096:4100]) == b"abcd"
    view.release()
    tier.close()


def test_too_much_memory_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="host-tier-gb"):
        LocalHostTier(1, 1 << 60)


class TierMachine(RuleBasedStateMachine):
    """Clients hold lists of pinned slots; the last commit of a slot says which key it may show."""

    num_slots = 5

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTierAllocator(self.num_slots)
        self.held: list[list[HostSlot]] = []

    @rule(keys=st.lists(st.one_of(st.none(), st.sampled_from(KEYS)), max_size=4))
    def reserve(self, keys: list[BlockKey | None]) -> None:
        room = self.tier.num_free + self.tier.num_cached
        pinned = {slot for slots in self.held for slot in slots}
        slots = self.tier.reserve(keys)
        assert (slots is None) == (len(keys) > room)
        if slots is not None:
            assert len(set(slots)) == len(keys)
            assert not set(slots) & pinned
            self.held.append(slots)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if self.held:
            self.tier.commit(self.held[data.draw(st.integers(0, len(self.held) - 1))])

    @rule(first=st.integers(0, 7), count=st.integers(1, 4))
    def lookup(self, first: int, count: int) -> None:
        wanted = KEYS[first : first + count]
        slots = self.tier.lookup(wanted)
        assert self.tier.missing(wanted[: len(slots) + 1]) == wanted[len(slots) : len(slots) + 1]
        self.held.append(slots)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.held:
            self.tier.unpin(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def pins_match(self) -> None:
        self.tier.check_integrity()
        for slot in range(self.num_slots):
            assert self.tier._pool.refcount(BlockId(slot)) == sum(slots.count(HostSlot(slot)) for slots in self.held)

    def teardown(self) -> None:
        for slots in self.held:
            self.tier.unpin(slots)
        assert self.tier.num_pinned == 0
        self.tier.check_integrity()


TierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTier = TierMachine.TestCase


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
