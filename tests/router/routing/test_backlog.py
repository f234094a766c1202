"""A worker's backlog of work by the router's own count."""

from __future__ import annotations

from typing import Any

from router.routing.worker_view import Backlog, Work


def leg(num_pending: int, **fields: Any) -> Work:
    known: dict[str, Any] = {"num_prompt_tokens": num_pending, "decodes": True, **fields}
    return Work(pending_tokens=num_pending, **known)


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
