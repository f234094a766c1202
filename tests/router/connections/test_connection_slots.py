"""Which clients get a connection, tested on plain counts."""

from __future__ import annotations

import pytest

from router.connections.connection_slots import NUM_SPARE_CONNECTIONS, ConnectionSlots, network_of


def fill(slots: ConnectionSlots[str], count: int, host: str) -> list[str]:
    names = [f"{host}-{number}" for number in range(count)]
    for name in names:
        assert slots.enter(name, host) is None
    return names


def test_the_reserve_is_for_addresses_that_have_few() -> None:
    slots = ConnectionSlots[str](160, 4)
    greedy = fill(slots, 161, "10.0.0.1")
    assert slots.is_spare(greedy[-1])
    others = fill(slots, 5, "10.0.0.2")
    assert [slots.is_spare(name) for name in others] == [False] * 4 + [True]
    third = fill(slots, 4, "10.0.0.3")
    assert not any(slots.is_spare(name) for name in third)
    last = fill(slots, 3, "10.0.0.4")  # the reserve, a sixteenth, is used up
    assert [slots.is_spare(name) for name in last] == [False, False, True]
    for name in (*greedy, *others, *third, *last):
        slots.leave(name)
    again = fill(slots, 160, "10.0.0.5")
    assert not any(slots.is_spare(name) for name in again)


def test_without_a_reserve_all_are_equal() -> None:
    slots = ConnectionSlots[str](32, 0)
    fill(slots, 32, "a")
    assert slots.enter("other", "b") is None
    assert slots.is_spare("other")


def test_the_oldest_spare_place_goes_to_a_newcomer() -> None:
    slots = ConnectionSlots[str](1, 0)
    names = fill(slots, 1 + NUM_SPARE_CONNECTIONS, "a")
    assert slots.enter("new", "b") == names[1]
    slots.leave(names[1])  # as its end is reported later
    slots.leave(names[2])
    assert slots.enter("newer", "b") is None
    assert slots.enter("newest", "b") == names[3]
    assert slots.max_open == 1 + NUM_SPARE_CONNECTIONS + 1


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("", ""),
        ("a:b:c", "a:b:c"),
    ],
)
def test_addresses(host: str, network: str) -> None:
    assert network_of(host) == network
