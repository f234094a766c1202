"""Which blocks are live, by definition: those with a key that a later query reads; and how many that can be."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.manager import NO_BLOCK, KVManager
from engine.kv_groups.block_groups import BlockGroups, group_table
from engine.kv_groups.manager import GroupedKVManager, held, keys_of
from engine.request import Request, RequestId, SamplingParams
from engine.windows.block_groups import WindowedGroups
from kvstore.pool.block_pool import BlockPool
from kvstore.types import BlockId

WINDOWS = st.lists(st.sampled_from([0, 1, 3, 4, 5, 8, 13]), min_size=1, max_size=4).map(
    lambda windows: tuple(sorted(windows, key=lambda window: window or 99, reverse=True))
)


def groups_of(block_size: int, windows: tuple[int, ...], step_tokens: int) -> BlockGroups:
    """Make the KV groups of a model with these windows."""
    return BlockGroups(block_size) if windows == (0,) else WindowedGroups(block_size, windows, step_tokens)


def manager_of(pool: BlockPool, groups: BlockGroups) -> KVManager:
    """Make the KV manager of a model with these groups."""
    is_windowed = isinstance(groups, WindowedGroups)
    return GroupedKVManager(pool, groups, "f") if is_windowed else KVManager(pool, groups.block_size, "f")


@given(WINDOWS, st.integers(1, 5), st.integers(0, 40), st.integers(0, 20))
def test_live_entries_are_those_that_later_queries_read(
    windows: tuple[int, ...], block_size: int, num_computed: int, num_new: int
) -> None:
    groups = WindowedGroups(block_size, windows, step_tokens=8)
    num_tokens = num_computed + num_new
    live = []
    for position in range(groups.num_positions(num_tokens)):
        last_token = (position + 1) * block_size - 1
        for group, window in enumerate(windows):
            if not window or last_token > num_computed - window:
                live.append(position * len(windows) + group)
    assert groups.live_entries(num_computed, num_tokens) == live
    assert groups.num_live(num_computed, num_tokens) == len(live)
    behind = [entry for entry in live if entry >= 2 * len(windows)]
    assert groups.live_entries(num_computed, num_tokens, first=2) == behind


@given(WINDOWS, st.integers(1, 5), st.integers(1, 9), st.data())
def test_what_a_sequence_holds_at_most(
    windows: tuple[int, ...], block_size: int, step_tokens: int, data: st.DataObject
) -> None:
    """Steps of any size, from a cached prefix of any length: within `most_live`, in pools that hold `longest`."""
    groups = groups_of(block_size, windows, step_tokens)
    num_blocks = data.draw(st.integers(1, 60))
    longest = groups.longest(num_blocks)
    num_tokens = 40 if longest is None else longest
    assert groups.most_live(num_tokens) <= num_blocks
    if not num_tokens:
        return
    pool = BlockPool(num_blocks)
    kv = manager_of(pool, groups)
    for salt in "aab":  # the second time from the cache
        request = Request(RequestId("r"), list(range(num_tokens)), SamplingParams(), cache_salt=salt)
        request.num_computed_tokens = kv.attach_cached(request, num_tokens - 1)
        while request.num_computed_tokens < num_tokens:
            step = min(data.draw(st.integers(1, step_tokens)), num_tokens - request.num_computed_tokens)
            before = request.num_computed_tokens
            assert kv.grow(request, before + step)
            assert pool.num_used == len(held(request.block_ids)) <= groups.most_live(before + step)
            for entry in groups.live_entries(before, before + step):
                assert request.block_ids[entry] in held(request.block_ids)
            request.num_computed_tokens += step
            kv.publish(request)
        kv.release(request)
        pool.check_integrity()
        assert pool.num_used == 0


@given(WINDOWS, st.integers(1, 4), st.integers(1, 40), st.booleans(), st.data())
def test_a_load_fills_what_no_cache_has_and_a_lease_takes_what_is_live(
    windows: tuple[int, ...], block_size: int, num_tokens: int, is_cached: bool, data: st.DataObject
) -> None:
    groups = groups_of(block_size, windows, step_tokens=64)
    pool = BlockPool(4 * groups.num_positions(num_tokens) * groups.num_groups, is_cached)
    kv = manager_of(pool, groups)
    earlier = Request(RequestId("e"), list(range(num_tokens)), SamplingParams())
    assert kv.grow(earlier, num_tokens)
    earlier.num_computed_tokens = data.draw(st.integers(0, num_tokens))
    kv.publish(earlier)
    kv.release(earlier)
    pool.release(pool.allocate(pool.num_free + data.draw(st.integers(0, pool.num_cached))))  # the oldest are evicted

    request = Request(RequestId("r"), list(range(num_tokens + 1)), SamplingParams())
    kv.attach_cached(request, data.draw(st.integers(0, num_tokens)))
    table = list(request.block_ids)
    if is_cached:
        for entry in range(len(table), num_tokens // block_size * len(windows)):
            position, group = divmod(entry, len(windows))
            [key] = keys_of(request, group, position, position + 1)
            table += pool.lookup([key]) or [NO_BLOCK]
    table += [NO_BLOCK] * (groups.num_positions(num_tokens) * groups.num_groups - len(table))
    fresh, num_cached = kv.attach_for_load(request, num_tokens)
    live = groups.live_entries(num_tokens, num_tokens)
    assert list(fresh) == [position for position, entry in enumerate(live) if table[entry] == NO_BLOCK]
    assert num_cached <= groups.num_positions(num_tokens) * block_size
    for position, entry in enumerate(live):
        block_id = request.block_ids[entry]
        assert block_id == fresh.get(position, table[entry])
        assert pool.refcount(block_id) == 1
        assert (pool.key_of(block_id) is None) == (position in fresh)
    expected = [request.block_ids[entry] for entry in live]
    assert kv.detach(request, num_tokens) == expected
    assert pool.num_used == len(expected)
    pool.check_integrity()


@pytest.mark.parametrize("windows", [(0,), (0, 64)])
def test_a_long_prompt_is_taken_in_and_handed_over_without_a_call_for_each_block(windows: tuple[int, ...]) -> None:
    """A call costs more than all other work for a block."""
    num_tokens = 16 * 1000
    kv = manager_of(BlockPool(3000), groups_of(16, windows, step_tokens=64))
    request = Request(RequestId("r"), list(range(num_tokens + 1)), SamplingParams())
    kv.prefixes.extend_keys(request)
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, _: calls.update([frame.f_code.co_name]) if event == "call" else None)
    try:
        kv.attach_for_load(request, num_tokens)
        kv.detach(request, num_tokens)
    finally:
        sys.setprofile(None)
    assert calls.total() < 100, calls


def test_only_the_first_group_is_announced() -> None:
    pool = BlockPool(20)
    kv = manager_of(pool, WindowedGroups(4, (0, 8), step_tokens=64))
    request = Request(RequestId("r"), list(range(32)), SamplingParams())
    assert kv.grow(request, 32)
    request.num_computed_tokens = 32
    kv.publish(request)
    kv.release(request)
    assert pool.num_cached == 16
    assert pool.take_events() == (request.block_keys, [])
    other = Request(RequestId("o"), list(range(32)), SamplingParams())
    assert kv.attach_cached(other, 31) == 28
    assert [block >= 0 for block in other.block_ids[1::2]] == [False] * 5 + [True] * 2
    assert len(held(other.block_ids)) == 7 + 2


def test_a_prefix_needs_what_its_window_sees() -> None:
    """A prefix without the block before its end is no hit; one without blocks further back is."""
    groups = WindowedGroups(4, (0, 6), step_tokens=64)
    present = {(position, group) for position in range(10) for group in range(2)}

    def has(position: int, group: int) -> bool:
        return (position, group) in present

    assert groups.longest_hit(10, has) == 10
    present -= {(position, 1) for position in range(8)}
    assert groups.longest_hit(10, has) == 10
    present.remove((9, 1))
    assert groups.longest_hit(10, has) == 0
    present |= {(0, 1), (1, 1), (2, 1)}
    assert groups.longest_hit(10, has) == 3
    present.remove((1, 0))
    assert groups.longest_hit(10, has) == 1


@pytest.mark.parametrize(
    ("windows", "num_blocks", "longest"),
    [((0,), 10, 40), ((6,), 9, None), ((6,), 4, 16), ((0, 6), 20, 44), ((0, 6), 6, 12)],
)
def test_the_longest_sequence(windows: tuple[int, ...], num_blocks: int, longest: int | None) -> None:
    assert WindowedGroups(4, windows, step_tokens=24).longest(num_blocks) == longest


@given(st.integers(1, 5), st.integers(0, 40), st.integers(0, 20), st.sets(st.integers(0, 12)))
def test_one_group_without_a_window_is_a_plain_one(
    block_size: int, num_computed: int, num_new: int, present: set[int]
) -> None:
    plain, groups = BlockGroups(block_size), WindowedGroups(block_size, (0,), step_tokens=8)
    num_tokens = num_computed + num_new
    assert plain.is_plain
    assert (plain.windows, plain.num_groups) == (groups.windows, groups.num_groups)
    assert plain.live_entries(num_computed, num_tokens) == groups.live_entries(num_computed, num_tokens)
    assert plain.num_live(num_computed, num_tokens) == groups.num_live(num_computed, num_tokens)
    assert plain.most_live(num_tokens) == groups.most_live(num_tokens)
    assert plain.longest(num_tokens) == groups.longest(num_tokens)

    def has(position: int, group: int) -> bool:
        return position in present

    assert plain.longest_hit(10, has) == groups.longest_hit(10, has)


def test_tables_by_group() -> None:
    table = [BlockId(number) for number in range(8)]
    assert group_table(table, 1, 2, 1, 4) == [3, 5, 7]
    assert group_table(table, 0, 1, 2, 5) == [2, 3, 4]
