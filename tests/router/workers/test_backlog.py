"""What a worker has still to compute, by what it was given and what it reported."""

from __future__ import annotations

from typing import Any

from router.workers.backlog import Backlog, Work


def leg(num_pending: int, late_until: float = 0.0, **fields: Any) -> Work:
    known: dict[str, Any] = {"num_prompt_tokens": num_pending, "decodes": True, **fields}
    return Work(pending_tokens=num_pending, late_until=late_until, **known)


def test_what_steps_computed_is_not_waiting_any_more() -> None:
    backlog, first, second = Backlog(), leg(10_000), leg(2_000)
    backlog.add(first)
    backlog.add(second)
    assert (backlog.prompt_tokens, backlog.context_tokens, backlog.num_rows) == (12_000, 12_000, 2)
    pairs = backlog.prompt_pairs
    backlog.computed(8_000, 32e6)
    assert backlog.prompt_tokens == 4_000
    assert backlog.prompt_pairs == pairs - 32e6
    backlog.computed(2_000, 18e6)
    backlog.settle(first)
    assert (backlog.prompt_tokens, backlog.prompt_pairs) == (2_000, 2e6)
    backlog.remove(second)  # cancelled
    backlog.remove(first)
    assert (backlog.prompt_tokens, backlog.prompt_pairs, backlog.context_tokens, backlog.num_rows) == (0, 0, 0, 0)
    backlog.computed(64, 100.0)  # a recompute after a preemption: nobody's first token
    backlog.add(leg(500))
    assert backlog.prompt_tokens == 500


def test_a_cached_prefix_is_before_each_token() -> None:
    backlog = Backlog()
    backlog.add(leg(1_000, num_prompt_tokens=5_000))
    assert backlog.prompt_pairs == 4_000 * 1_000 + 1_000 * 1_000 / 2


def test_late_prompts_wait_until_nothing_else_is_left_or_their_time_has_come() -> None:
    backlog, in_time, late, later = Backlog(), leg(2_000), leg(20_000, late_until=5.0), leg(30_000, late_until=7.0)
    for each in (in_time, late, later):
        backlog.add(each)
    assert backlog.deferred(now=4.0)[0] == 50_000
    assert backlog.deferred(now=6.0)[0] == 30_000
    assert backlog.deferred(now=8.0) == (0, 0)
    backlog.computed(2_000, 2e6)
    backlog.settle(in_time)
    assert backlog.deferred(now=4.0)[0] == 30_000  # the first of them begins
    backlog.computed(8_192, 33e6)
    backlog.remove(late)
    backlog.remove(later)
    assert backlog.deferred(now=4.0) == (0, 0)
