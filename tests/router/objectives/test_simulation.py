"""What adaptive placement is worth: the router's own policies on two simulated GPUs, beside fixed roles and none."""

from __future__ import annotations

from functools import cache

import pytest

from router.objectives.objectives import Objectives
from tests.router.objectives.simulation import Outcome, closed_loop, open_loop

OBJECTIVES = Objectives(ttft=1.0, itl=0.025)
MODES = ("aggregated", "static", "adaptive")
SATURATION = 70.0  # requests of 1,024 in and 128 out a second
# Of Mooncake's conversation trace, the first 2,000 requests with fewer than 30,000 tokens in, sorted by these: every
# thirtieth, as (prompt, output). 8,861 in and 352 out on average; of all of them 8,960 and 344.
CONVERSATIONS = (
    (893, 334), (896, 438), (898, 529), (901, 402), (910, 485), (934, 421), (979, 427), (1081, 369), (1183, 236),
    (1309, 111), (1437, 348), (1542, 530), (1706, 332), (1845, 190), (2018, 9), (2247, 423), (2570, 582),
    (2839, 245), (3181, 547), (3700, 178), (4049, 360), (4338, 94), (4596, 450), (4885, 353), (5149, 510),
    (5368, 338), (5722, 515), (5994, 444), (6284, 507), (6603, 20), (6886, 366), (7190, 26), (7617, 435),
    (8001, 1298), (8429, 439), (8772, 2), (9154, 501), (9535, 529), (9974, 279), (10447, 209), (10938, 247),
    (11341, 16), (11869, 625), (12339, 558), (13245, 3), (13780, 560), (14447, 330), (15330, 473), (15936, 294),
    (16637, 3), (17450, 610), (18215, 236), (19085, 247), (19978, 3), (21282, 3), (22684, 68), (24061, 810),
    (25529, 364), (27055, 109), (28363, 721),
)  # fmt: skip
NOISE = 0.02  # requests that end within the window differ by as much


@cache
def at_rate(rate: float, length: tuple[int, int] = (1024, 128), seconds: float = 12) -> dict[str, Outcome]:
    return {mode: open_loop(mode, OBJECTIVES, rate, [length], seconds) for mode in MODES}


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
    assert adaptive.ttft_p99 < 1.3 * OBJECTIVES.ttft


def test_long_answers_are_kept_when_decode_workers_have_no_seats() -> None:
    found = at_rate(95.0, (128, 512), seconds=18)
    assert found["adaptive"].placements["kept"] > 100
    assert found["adaptive"].good_per_second >= 0.97 * found["aggregated"].good_per_second
    assert found["adaptive"].good_per_second > 1.2 * found["static"].good_per_second


def test_a_wait_for_a_seat_is_one_gap_of_a_long_answer() -> None:
    """Prompts that take most of the prefill worker's time leave no room for streams beside them."""
    for rate in (62.0, 66.0):
        found = {mode: open_loop(mode, OBJECTIVES, rate, [(512, 512)], seconds=14) for mode in ("static", "adaptive")}
        assert found["adaptive"].good_per_second >= 0.97 * found["static"].good_per_second


@pytest.mark.parametrize(
    ("rate", "mixed_ms"),
    [
        pytest.param(rate, mixed_ms, marks=[pytest.mark.soak] if (rate + mixed_ms / 4) % 2 else [])
        for rate in (1.0, 2.0, 3.0, 4.0, 5.0)
        for mixed_ms in (0.0, 4.0)
    ],
)
def test_long_prompts_of_many_lengths(rate: float, mixed_ms: float) -> None:
    """At 4 and 5 requests a second their prompts fill more than one GPU, and some first tokens cannot be in time.

    mixed_ms: what a step with prompts beside streams takes more than the sum of both.
    """
    found = {
        mode: open_loop(mode, OBJECTIVES, rate, CONVERSATIONS, seconds=60, mixed_seconds=mixed_ms / 1e3)
        for mode in MODES
    }
    adaptive, aggregated, static = (found[mode] for mode in ("adaptive", "aggregated", "static"))
    best = max(aggregated.good_per_second, static.good_per_second)
    assert adaptive.good_per_second >= best
    if rate > 1.0:
        assert adaptive.good_per_second > best
    assert adaptive.gap_p99 < OBJECTIVES.itl
    assert adaptive.output_tokens_per_second >= 0.95 * aggregated.output_tokens_per_second
    if rate >= 3.0:
        assert adaptive.good_per_second > 1.4 * best
    assert adaptive.ttft_p99 < 6 * OBJECTIVES.ttft  # those that are too late anyway wait, but not for ever
