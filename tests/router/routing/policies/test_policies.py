"""Policies that make no predictions."""

from __future__ import annotations

from collections import Counter

from kvstore.types import WorkerId
from router.routing.policy import choose
from router.routing.views import WorkerView
from tests.router.routing.test_policy import D0, D1, P0, P1, request, view


def test_round_robin_random_and_power_of_two() -> None:
    decode = [view(D0, num_running=2, num_waiting=3), view(D1, num_running=4)]
    turns = [choose("round-robin", request(turn=i), [], decode, 0).chosen.decode for i in range(4)]
    assert turns == [D0, D1, D0, D1]
    draws = Counter(choose("random", request(draw=i / 10), [], decode, 0).chosen.decode for i in range(10))
    assert draws == {D0: 5, D1: 5}
    draws = Counter(choose("power-of-two", request(draw=i / 100), [], decode, 0).chosen.decode for i in range(100))
    assert draws == {D0: 25, D1: 75}  # D0 only where both draws hit it


def test_sessions_stick_and_move_only_with_their_worker() -> None:
    names = [WorkerId(f"d{i}") for i in range(4)]
    decode = [view(name) for name in names]

    def owner(session: str, workers: list[WorkerView]) -> WorkerId:
        return choose("session-sticky", request(session=session), [], workers, 0).chosen.decode

    before = {f"s{i}": owner(f"s{i}", decode) for i in range(60)}
    assert set(before.values()) == set(names)
    after = {session: owner(session, decode[1:]) for session in before}
    assert all(after[session] == worker for session, worker in before.items() if worker != names[0])
    prefill = [view(P0), view(P1)]
    pairs = {choose("session-sticky", request(session=name), prefill, decode, 0).chosen.prefill for name in before}
    assert pairs == {P0, P1}
    for fast in names:  # without a session, the cheapest
        assert owner("", [view(name, step=0.01 if name == fast else 0.1) for name in names]) == fast
