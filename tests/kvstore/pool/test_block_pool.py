"""The pool against a plain model of it, in any order of operations."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import OverloadedError
from common.token_ids import pack_ids
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.pool.block_pool import BlockPool, PoolExhausted
from kvstore.types import BlockId, BlockKey

KEYS = block_keys(root_key("model"), pack_ids(range(12)), 1)


def test_free_blocks_go_first_then_the_least_recently_used_tail_first() -> None:
    pool = BlockPool(5)
    old, new = pool.allocate(2), pool.allocate(2)
    for block_id, key in zip(old + new, KEYS, strict=False):
        pool.publish(block_id, key)
    pool.release(old)
    pool.release(new)
    assert not set(pool.allocate(1)) & set(old + new)
    assert pool.take_evicted() == []
    assert pool.allocate(3) == [old[1], old[0], new[1]]
    assert pool.take_evicted() == [(old[1], KEYS[1]), (old[0], KEYS[0]), (new[1], KEYS[3])]
    assert pool.take_evicted() == []
    assert pool.allocate(1) == [new[0]]
    assert pool.take_evicted() == [(new[0], KEYS[2])]


def test_using_a_cached_block_makes_it_recent() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, KEYS[0])
    pool.publish(second, KEYS[1])
    pool.release([first])
    pool.release([second])
    pool.acquire([first])
    pool.release([first])
    assert pool.allocate(1) == [second]


def test_the_first_block_keeps_a_key() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    assert pool.publish(a, KEYS[0])
    assert not pool.publish(b, KEYS[0])
    assert pool.publish(a, KEYS[0])
    assert pool.key_of(b) is None
    pool.release([b])
    assert pool.num_free == 1
    assert pool.take_events() == ([KEYS[0]], [])


def test_events_are_net() -> None:
    pool = BlockPool(1)
    [block_id] = pool.allocate(1)
    pool.publish(block_id, KEYS[0])
    assert pool.take_events() == ([KEYS[0]], [])
    pool.release([block_id])
    pool.allocate(1)
    pool.publish(block_id, KEYS[1])
    pool.release([block_id])
    pool.allocate(1)
    assert pool.take_events() == ([], [KEYS[0]])
    pool.publish(block_id, KEYS[0])
    pool.release([block_id])
    pool.allocate(1)
    assert pool.take_events() == ([], [])


def test_without_prefix_cache_nothing_is_findable() -> None:
    pool = BlockPool(1, enable_prefix_cache=False)
    [block_id] = pool.allocate(1)
    assert not pool.publish(block_id, KEYS[0])
    pool.release([block_id])
    assert pool.num_free == 1
    assert pool.lookup(KEYS) == []


def test_bugs_are_caught() -> None:
    pool = BlockPool(2)
    [block_id] = pool.allocate(1)
    pool.publish(block_id, KEYS[0])
    with pytest.raises(AssertionError, match="another key"):
        pool.publish(block_id, KEYS[1])
    pool.release([block_id])
    with pytest.raises(AssertionError, match="release"):
        pool.release([block_id])
    with pytest.raises(AssertionError, match="publish"):
        pool.publish(block_id, KEYS[0])
    with pytest.raises(AssertionError, match="acquire"):
        pool.acquire([BlockId(1 - block_id)])
    pool.check_integrity()


def test_check_integrity_sees_a_block_in_two_states() -> None:
    pool = BlockPool(2)
    pool._free.append(pool.allocate(1)[0])
    with pytest.raises(AssertionError, match="True, False, True"):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Sequences come and go; a dict of references and one of keys model the pool's state."""

    num_blocks = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.num_blocks)
        self.sequences: list[list[BlockId]] = []
        self.told: set[BlockKey] = set()

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        available = self.pool.num_available
        if count > available:
            with pytest.raises(PoolExhausted) as raised:
                self.pool.allocate(count)
            assert isinstance(raised.value, OverloadedError)
            assert self.pool.num_available == available
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not {b for sequence in self.sequences for b in sequence} & set(blocks)
        self.sequences.append(blocks)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: BlockKey) -> None:
        used = [b for sequence in self.sequences for b in sequence if self.pool.key_of(b) is None]
        if used:
            block_id = data.draw(st.sampled_from(used))
            assert self.pool.publish(block_id, key) == (self.pool.lookup([key]) == [block_id])

    @rule(first=st.integers(0, 11), count=st.integers(1, 4))
    def reuse(self, first: int, count: int) -> None:
        blocks = self.pool.lookup(KEYS[first : first + count])
        found = self.pool.find(KEYS, BlockId(-1))
        assert [block_id >= 0 for block_id in found] == [self.pool.contains(key) for key in KEYS]
        assert found[first : first + len(blocks)] == blocks
        self.pool.acquire(blocks)
        self.sequences.append(blocks)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.sequences:
            self.pool.release(self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1))))

    @rule()
    def tell(self) -> None:
        stored, removed = self.pool.take_events()
        assert not set(stored) & self.told
        assert set(removed) <= self.told
        self.told = (self.told | set(stored)) - set(removed)
        assert self.told == {key for key in KEYS if self.pool.contains(key)}

    @rule()
    def evictions(self) -> None:
        evicted = self.pool.take_evicted()
        assert len({block_id for block_id, _ in evicted}) == len(evicted)

    @invariant()
    def references_match(self) -> None:
        self.pool.check_integrity()
        counts = [0] * self.num_blocks
        for sequence in self.sequences:
            for block_id in sequence:
                counts[block_id] += 1
        assert counts == [self.pool.refcount(BlockId(i)) for i in range(self.num_blocks)]
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == self.num_blocks

    def teardown(self) -> None:
        for sequence in self.sequences:
            self.pool.release(sequence)
        assert self.pool.num_used == 0
        self.pool.check_integrity()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPool = PoolMachine.TestCase
