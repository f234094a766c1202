"""The order of service under policies that obstruct it: one admits nobody, one always preempts."""

from __future__ import annotations

import pytest

from engine.scheduling.policy import EngineView, PolicyOrder, RequestView
from tests.engine.priorities.test_priorities import LONG, assert_undisturbed, on_all_paths
from tests.engine.scheduling.engines import assert_quiet, make_engine, run_all


class Hesitant:
    """Admits no request."""

    def key(self, request: RequestView) -> tuple[float, ...]:
        return (request.arrival,)

    def preempts(self, newcomer: RequestView, other: RequestView) -> bool:
        return False

    def admits(self, request: RequestView, engine: EngineView) -> bool:
        assert engine.num_free_blocks < engine.num_blocks == 64
        assert (engine.num_running, engine.num_waiting > 0) == (1, True)
        return False


def test_who_is_not_admitted_starts_when_nothing_runs() -> None:
    engine, _ = make_engine(64, order=PolicyOrder(Hesitant()))
    requests = [engine.add_request([i + 1] * 5, LONG) for i in range(3)]
    while engine.has_work():
        engine.step()
        assert engine.load().num_running <= 1
    assert_undisturbed(requests)


class Contrary:
    """Serves the last arrival first, and always preempts another request for it."""

    def key(self, request: RequestView) -> tuple[float, ...]:
        return (-request.arrival,)

    def admits(self, request: RequestView, engine: EngineView) -> bool:
        return bool(engine.num_free_blocks % 2)

    def preempts(self, newcomer: RequestView, other: RequestView) -> bool:
        return True


@pytest.mark.wing("kvstore.tier")
@on_all_paths
def test_no_policy_can_stop_the_engine(swap: bool, overlap: bool) -> None:
    engine, _ = make_engine(
        14, host_slots=20, max_num_seqs=3, swap=swap, overlap=overlap, order=PolicyOrder(Contrary())
    )
    requests = []
    for index in range(12):
        requests.append(engine.add_request([index + 1] * (1 + 5 * index % 23), LONG, priority=index % 3))
        engine.step()
        engine.step()
    run_all(engine)
    assert_undisturbed(requests)
    assert engine.load().num_preemptions > 0
    assert_quiet(engine)
