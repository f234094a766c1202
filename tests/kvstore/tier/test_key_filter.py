"""The counting filter of keys: no false negatives, few false positives."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator

import pytest

from kvstore.tier.key_filter import MOST, KeyFilter, num_cells
from kvstore.types import BlockKey

pytestmark = pytest.mark.wing("kvstore.tier")
BLOCK_BYTES = 64


def keys_of(rng: random.Random, count: int) -> list[BlockKey]:
    return [BlockKey(rng.randbytes(32)) for _ in range(count)]


@pytest.fixture(params=[1, 5, 1000])
def sized(request: pytest.FixtureRequest) -> Iterator[tuple[KeyFilter, int]]:
    num_slots = request.param
    region = mmap.mmap(-1, num_slots * BLOCK_BYTES + num_cells(num_slots))
    found = KeyFilter(region, num_slots, BLOCK_BYTES)
    yield found, num_slots
    assert region[: num_slots * BLOCK_BYTES] == bytes(num_slots * BLOCK_BYTES), "blocks are not its own"
    found.close()
    region.close()


def test_keys_come_and_go(sized: tuple[KeyFilter, int]) -> None:
    keys, num_slots = sized
    rng = random.Random(1)
    there: list[BlockKey] = []
    for _ in range(20):
        new = keys_of(rng, rng.randint(1, num_slots))
        gone = there[: max(len(there) + len(new) - num_slots, 0)]
        keys.count(new, gone)
        there = [*there[len(gone) :], *new]
        assert all(map(keys.may_have, there))
        others = keys_of(rng, 400)
        assert sum(map(keys.may_have, others)) < 0.15 * len(others)
    keys.count([], there)
    assert not any(map(keys.may_have, [*there, *keys_of(rng, 400)]))


def test_a_cell_that_is_full_stays_full(sized: tuple[KeyFilter, int]) -> None:
    keys, _ = sized
    [key] = keys_of(random.Random(2), 1)
    keys.count([key] * (MOST + 10), [])
    keys.count([], [key] * (MOST + 10))
    assert keys.may_have(key)
