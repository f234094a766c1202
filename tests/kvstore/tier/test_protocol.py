"""Two workers' sessions on one region, in any order, with valid and invalid requests."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from common.token_ids import pack_ids
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.tier.host_tier import HostTierAllocator
from kvstore.tier.protocol import TierSession, parse_hello
from kvstore.types import BlockId, HostSlot

KEYS = block_keys(root_key("model"), pack_ids(range(6)), 1)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3) | st.sampled_from(KEYS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)
verbs = st.sampled_from(["lookup", "missing", "reserve", "commit", "unpin", "check", "hello"])
requests = st.one_of(
    st.tuples(verbs, st.lists(st.sampled_from([*KEYS, None]), max_size=4)).map(list),
    st.tuples(verbs, st.lists(st.integers(0, 5), max_size=4)).map(list),
    st.tuples(verbs, values).map(list),
    values,
)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 1), requests), max_size=30))
def test_whatever_they_ask_no_slot_is_lost(conversation: list[tuple[int, Any]]) -> None:
    tier = HostTierAllocator(5)
    sessions = [TierSession(tier), TierSession(tier)]
    for who, request in conversation:
        try:
            reply = sessions[who].handle(request)
        except InvalidRequestError:
            continue
        assert reply[0] == "ok"
        tier.check_integrity()
        pins = sum((session._pins for session in sessions), Counter())
        assert all(tier._pool.refcount(BlockId(slot)) == pins[HostSlot(slot)] for slot in range(5))
    for session in sessions:
        session.close()
    assert tier.num_pinned == 0
    tier.check_integrity()


def test_a_worker_cannot_give_up_another_ones_pins() -> None:
    tier = HostTierAllocator(2)
    owner, other = TierSession(tier), TierSession(tier)
    _, slots = owner.handle(["reserve", [KEYS[0], None]])
    for verb in ("unpin", "commit"):
        with pytest.raises(InvalidRequestError, match="did not pin"):
            other.handle([verb, slots])
    with pytest.raises(InvalidRequestError, match="did not pin"):
        owner.handle(["unpin", [slots[0], slots[0]]])
    other.close()
    assert tier.num_pinned == 2
    owner.handle(["commit", slots])
    owner.close()
    assert other.handle(["lookup", KEYS]) == ["ok", slots[:1]]


@given(values)
def test_only_a_hello_is_a_hello(message: Any) -> None:
    with pytest.raises(InvalidRequestError):
        parse_hello(message)
    assert parse_hello(["hello", "model", 4096]) == ("model", 4096)
