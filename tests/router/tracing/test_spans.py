"""Spans of time lines that are rare in a cluster."""

from __future__ import annotations

import pytest

from protos import types_pb2 as pb
from router.journal import DEADLINE_EXCEEDED, FIRST_OUTPUT, MOVED, WAITING, Journal
from router.tracing.spans import Span, request_span


def journal(outcome: str = "stop") -> Journal:
    made = Journal("chatcmpl-1-0", [1, 2, 3], pb.SamplingParams(max_tokens=9), deadline=100.0, arrival=10.0)
    made.outcome = outcome
    return made


def named(span: Span) -> list[str]:
    return [child.name for child in span.children]


def spans_of(made: Journal, end: float = 20.0) -> list[Span]:
    root = request_span("chatcmpl-1", "m", {made: 0}, end)
    assert (root.start, root.end) == (10.0, end)
    spans = root.children
    assert [span.start for span in spans] == [10.0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == end
    return spans


def test_a_pull_that_failed_is_followed_by_the_prompt() -> None:
    made = journal()
    made.note(11.0, "decode", worker="d0")
    times = pb.RequestTimes(queue_seconds=0.5, kv_pull_seconds=0.25, prefill_seconds=1.0, kv_pull_failed=True)
    made.note(13.0, FIRST_OUTPUT, worker="d0", times=times)
    _, leg = spans_of(made)
    assert named(leg) == ["queue", "kv_pull", "prefill", "decode"]
    assert [(span.start, span.end) for span in leg.children] == [
        (11.25, 11.75), (11.75, 12.0), (12.0, 13.0), (13.0, 20.0)
    ]  # fmt: skip
    assert [bool(span.error) for span in leg.children] == [False, True, False, False]


def test_what_a_worker_measured_stays_within_its_leg() -> None:
    made = journal()
    made.note(11.0, "decode", worker="d0")
    made.note(11.5, FIRST_OUTPUT, worker="d0", times=pb.RequestTimes(queue_seconds=3.0, prefill_seconds=0.4))
    _, leg = spans_of(made)
    assert [span.start for span in leg.children] == [11.0, 11.1, 11.5]


def test_a_move_lasts_until_a_worker_has_come() -> None:
    made = journal("error")
    made.note(10.5, WAITING)
    made.note(11.0, "decode", worker="d0")
    made.note(12.0, MOVED, reason="d0 was lost")
    made.note(12.0, WAITING)
    made.note(15.0, "decode", worker="d1")
    made.output_token_ids.append(7)
    made.note(15.5, FIRST_OUTPUT, worker="d1")
    made.output_token_ids += [8, 9]
    made.note(16.0, MOVED, reason="d1 was lost")
    made.note(17.0, "decode", worker="d2")
    made.output_token_ids.append(1)
    made.note(17.5, FIRST_OUTPUT, worker="d2")
    made.output_token_ids.append(2)
    made.note(18.0, MOVED, reason="d2 was lost")
    made.num_migrations, made.num_moves = 2, 1
    _, wait, first, move, second, _, third, last = spans_of(made)
    assert [span.name for span in (wait, first, move, second, third, last)] == [
        "wait_for_worker", "decode_leg", "move", "decode_leg", "decode_leg", "move"
    ]  # fmt: skip
    assert (move.start, move.end) == (12.0, 15.0)
    assert move.attributes == {
        "mini_infer.worker.from": "d0", "mini_infer.worker.to": "d1", "mini_infer.move.reason": "d0 was lost"
    }  # fmt: skip
    assert (first.error, wait.error, first.children) == ("d0 was lost", "", [])
    assert "mini_infer.worker.to" not in last.attributes
    decodes = [leg.children[-1].attributes["mini_infer.output_tokens"] for leg in (second, third)]
    assert decodes == [3, 2]
    assert request_span("chatcmpl-1", "m", {made: 0}, 20.0).attributes["mini_infer.moves"] == 3


@pytest.mark.parametrize(
    ("outcome", "error"), [("length", ""), ("error", "error"), ("refused", "refused"), ("abort", "")]
)
def test_what_a_client_is_refused_is_an_error(outcome: str, error: str) -> None:
    made = journal(outcome)
    made.note(11.0, "decode", worker="d0")
    made.note(12.0, DEADLINE_EXCEEDED)
    root = request_span("chatcmpl-1", "m", {made: 0}, 12.5)
    assert (root.error, named(root)) == (error, ["accept", "decode_leg"])
    assert "gen_ai.latency.time_to_first_token" not in root.attributes


def test_a_choice_that_never_began_has_no_span() -> None:
    first = journal("error")
    first.note(11.0, "decode", worker="d0")
    root = request_span("chatcmpl-1", "m", {first: 0, journal("abort"): 0}, 12.0)
    [choice] = root.children
    assert (choice.attributes, choice.end, root.error) == ({"mini_infer.choice.index": 0}, 12.0, "error")
    assert root.attributes["gen_ai.response.finish_reasons"] == ["error", "abort"]
