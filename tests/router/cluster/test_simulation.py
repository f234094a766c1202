"""What adaptive placement is worth: the router's own policies on two simulated GPUs, beside fixed roles and none."""

from __future__ import annotations

import pytest

from router.cluster.placement import Objectives
from tests.router.cluster.simulation import Outcome, closed_loop, open_loop

OBJECTIVES = Objectives(ttft=1.0, itl=0.025)
MODES = ("aggregated", "static", "adaptive")
SATURATION = 70.0  # requests of 1,024 in and 128 out a second
NOISE = 0.02  # requests that end within the window differ by as much


def at_rate(rate: float, length: tuple[int, int] = (1024, 128)) -> dict[str, Outcome]:
    return {mode: open_loop(mode, OBJECTIVES, rate, [length], seconds=16) for mode in MODES}


@pytest.mark.parametrize("share", [0.15, 0.3, 0.45, 0.6, 0.75, 0.9])
def test_adaptive_has_the_highest_goodput_at_every_rate(share: float) -> None:
    found = at_rate(share * SATURATION)
    best = max(found["aggregated"].good_per_second, found["static"].good_per_second)
    assert found["adaptive"].good_per_second >= (1 - NOISE) * best
    if share >= 0.75:  # where either of the others gives up
        assert found["adaptive"].good_per_second > 1.3 * best


@pytest.mark.parametrize("share", [0.15, 0.3, 0.45])
def test_streams_are_nearly_as_smooth_as_with_fixed_roles_below_60_percent(share: float) -> None:
    found = at_rate(share * SATURATION)
    assert found["adaptive"].gap_p99 <= 1.3 * found["static"].gap_p99
    assert found["adaptive"].ttft_p99 <= 1.05 * found["static"].ttft_p99


def test_saturated_it_gives_what_two_that_do_both_give_and_keeps_the_gaps_short() -> None:
    found = {mode: closed_loop(mode, OBJECTIVES, 256, (1024, 128), seconds=30) for mode in MODES}
    adaptive, aggregated = found["adaptive"], found["aggregated"]
    assert adaptive.output_tokens_per_second >= 0.95 * aggregated.output_tokens_per_second
    assert adaptive.output_tokens_per_second > 1.4 * found["static"].output_tokens_per_second
    assert adaptive.gap_p99 < OBJECTIVES.itl < aggregated.gap_p99
    assert adaptive.ttft_p99 < OBJECTIVES.ttft


def test_long_answers_are_kept_when_decode_workers_have_no_seats() -> None:
    found = at_rate(80.0, (128, 512))
    assert found["adaptive"].placements["kept"] > 100
    assert found["adaptive"].good_per_second >= 0.97 * found["aggregated"].good_per_second
    assert found["adaptive"].good_per_second > 1.2 * found["static"].good_per_second
