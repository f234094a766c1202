from __future__ import annotations

import pytest

from engine.speculation.acceptance import PRIOR, Acceptance, DraftRecord


def follow(
    acceptance: Acceptance, record: DraftRecord, drafts: list[int], kinds: list[int], sampled: list[int]
) -> None:
    acceptance.propose(record, drafts, kinds)
    acceptance.learn(record, sampled)


def test_kinds_are_learned_from_what_was_sampled() -> None:
    """Whether a step computed the drafts or not: then one token alone tells."""
    acceptance = Acceptance(3)
    for number in range(100):
        follow(acceptance, DraftRecord(), [1, 2, 3], [2, 1, 0], [1, 9])
        follow(acceptance, DraftRecord(), [1, 2, 3], [2, 1, 0], [1] if number % 2 else [4])
    new = DraftRecord()
    assert acceptance.of_kind(new, 2) == pytest.approx(0.75, abs=0.05)
    assert acceptance.of_kind(new, 1) < 0.1
    assert acceptance.of_kind(new, 0) == PRIOR  # never came that far
    assert acceptance.of_any(new) == pytest.approx(0.5, abs=0.05)


def test_a_request_may_differ_from_others() -> None:
    acceptance, odd = Acceptance(1), DraftRecord()
    for _ in range(100):
        follow(acceptance, DraftRecord(), [1], [0], [1])
    for _ in range(10):
        follow(acceptance, odd, [1], [0], [2])
    assert acceptance.of_kind(DraftRecord(), 0) > 0.85
    assert acceptance.of_kind(odd, 0) < 0.4
    for _ in range(30):
        follow(acceptance, odd, [1], [0], [1])
    assert acceptance.of_kind(odd, 0) > 0.85


def test_estimates_come_with_the_drafts() -> None:
    acceptance = Acceptance(2)
    drafts = acceptance.propose(DraftRecord(), [5, 6], [1, 0])
    assert (drafts.token_ids, drafts.acceptance) == ([5, 6], [PRIOR, PRIOR])
