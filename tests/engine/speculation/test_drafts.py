"""Drafts in the scheduler, against the runner that remembers what was written where: they change no token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.request import FinishReason, Request, SamplingParams
from engine.speculation.draft_length import DraftLengths
from engine.speculation.drafter import Drafter, Proposal
from engine.speculation.drafts import Speculation
from engine.speculation.from_tokens import FromTokens
from tests.engine.driving import num_drafts
from tests.engine.fakes import VOCAB_SIZE, BlockMemoryRunner, expected_tokens
from tests.engine.scheduling.engines import (
    SMALL_ENGINES,
    assert_quiet,
    check_any_order,
    load_request,
    make_engine,
    run_all,
    run_swapped,
)
from tests.engine.speculation.drafters import MakeOracle, of_one_kind


def drafting(
    accuracy: float, num_tokens: int = 4, seed: int = 0, **options: object
) -> tuple[Engine, BlockMemoryRunner]:
    return make_drafting(MakeOracle(expected_tokens, accuracy, VOCAB_SIZE, seed), num_tokens, **options)


def make_drafting(
    make_drafter: Callable[[], Drafter], num_tokens: int, **options: object
) -> tuple[Engine, BlockMemoryRunner]:
    made, runner = make_engine(speculation=Speculation(DraftLengths(is_adaptive=False)), **options)  # type: ignore[arg-type]
    runner.proposer = FromTokens(lambda _request: make_drafter(), num_tokens, 1)
    return made, runner


class Always(Drafter):
    """Proposes as many tokens of `following` as it may."""

    def __init__(self, following: Callable[[list[int], int], list[int]] = expected_tokens) -> None:
        self._following = following

    def propose(self, token_ids: list[int], max_tokens: int) -> Proposal:
        return of_one_kind(self._following(token_ids, max_tokens))


def wrong(token_ids: list[int], count: int) -> list[int]:
    return [(token + 1) % VOCAB_SIZE for token in expected_tokens(token_ids, count)]


def always(following: Callable[[list[int], int], list[int]], num_tokens: int = 4, **options: object) -> Engine:
    return make_drafting(lambda: Always(following), num_tokens, **options)[0]


def steps_of(engine: Engine, request: Request) -> list[int]:
    """Return the output tokens of each step."""
    counts = []
    while engine.has_work():
        before = len(request.output_token_ids)
        engine.step()
        counts.append(len(request.output_token_ids) - before)
        engine.kv.pool.check_integrity()
    return counts


def test_right_drafts_are_kept_and_counted() -> None:
    engine = always(expected_tokens)
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=13))
    outcomes = [engine.step() for _ in range(4)]
    counts = [len(output.new_token_ids) for outcome in outcomes for output in outcome.outputs]
    assert counts == [1, 5, 5, 2]  # the last step has room for one draft only
    last = outcomes[-1].stats
    assert last is not None
    assert (last.size.num_decode_tokens, last.size.num_prompt_tokens) == (2, 0)
    assert request.output_token_ids == expected_tokens([1, 2, 3], 13)
    assert num_drafts(engine) == (9, 9)
    assert_quiet(engine)


def test_wrong_drafts_are_taken_back() -> None:
    engine = always(wrong)
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=6))
    assert steps_of(engine, request) == [1] * 6
    assert request.output_token_ids == expected_tokens([1, 2, 3], 6)
    assert num_drafts(engine) == (4 + 3 + 2 + 1, 0)
    assert_quiet(engine)


def test_a_stop_token_among_accepted_ones_ends_the_answer_there() -> None:
    expected = expected_tokens([1, 2, 3], 6)
    engine = always(expected_tokens, eos=frozenset([expected[3]]))
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=20))
    [ended] = [output for output in (*engine.step().outputs, *engine.step().outputs) if output.finish_reason]
    assert (ended.finish_reason, ended.stop_token_id) == (FinishReason.STOP, expected[3])
    assert ended.new_token_ids == expected[1:4]
    assert request.output_token_ids == expected[:4]
    assert_quiet(engine)


def test_a_sequence_ends_at_the_models_length() -> None:
    engine = always(expected_tokens, num_tokens=9, max_model_len=16)
    request = engine.add_request([1] * 10, SamplingParams(max_tokens=100))
    assert steps_of(engine, request) == [1, 5]
    assert request.num_tokens == 16
    assert num_drafts(engine) == (4, 4)
    assert_quiet(engine)


def test_blocks_become_findable_when_their_tokens_are_accepted() -> None:
    """A block full of unaccepted drafts must not be found in the prefix cache."""
    for following, num_cached in ((expected_tokens, 8), (wrong, 4)):
        engine = always(following, num_tokens=7)
        request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=20))
        engine.step()
        engine.step()
        assert len(request.block_ids) == 3  # tokens 4 to 11 are written, or drafts in their places
        assert request.num_published_blocks == num_cached // 4
        other = engine.add_request([1, 2, 3, *expected_tokens([1, 2, 3], 9)], SamplingParams(max_tokens=1))
        engine.step()
        assert other.num_cached_tokens == num_cached


def test_drafts_take_no_token_from_others() -> None:
    """Two decode rows share a budget of 8 with a prompt; drafts get what remains."""
    engine = always(wrong, budget=8, num_blocks=64)
    for first in (1, 2):
        engine.add_request([first] * 3, SamplingParams(max_tokens=40))
    sizes = []
    for number in range(7):
        if number == 3:
            engine.add_request([3] * 20, SamplingParams(max_tokens=4))
        sizes.append([(row.num_tokens, len(row.draft_token_ids)) for row in engine.step().plan.rows])
    assert sizes[2:] == [[(5, 4), (3, 2)], *[[(1, 0), (1, 0), (6, 0)]] * 3, [(5, 4), (1, 0), (2, 0)]]


def test_drafts_take_no_block_that_another_will_need() -> None:
    """As many steps and preemptions as without, though wrong drafts would fill any number of blocks."""
    counts = []
    for engine in (make_engine(num_blocks=12, max_num_seqs=6)[0], always(wrong, num_blocks=12, max_num_seqs=6)):
        requests = [engine.add_request([100 + i, 200 + i, 300 + i], SamplingParams(max_tokens=20)) for i in range(6)]
        run_all(engine)
        for i, request in enumerate(requests):
            assert request.output_token_ids == expected_tokens([100 + i, 200 + i, 300 + i], 20)
        counts.append((engine.num_steps, engine.load().num_preemptions))
        assert_quiet(engine)
    assert counts[0][1] > 0
    assert counts[1] == counts[0]


def test_a_draft_that_fails_costs_its_step_and_nothing_else() -> None:
    engine, runner = make_drafting(lambda: Always(lambda _ids, _count: [666]), 4)
    runner.fail_on = {666}
    requests = [engine.add_request([1, 2, first], SamplingParams(max_tokens=5)) for first in (3, 4)]
    tokens = run_all(engine)
    for request, first in zip(requests, (3, 4), strict=True):
        assert tokens[request.request_id] == expected_tokens([1, 2, first], 5)
    assert engine.num_failed_steps == 3  # all but the prompts' and the last, which has no room for a draft
    assert num_drafts(engine)[1] == 0
    assert_quiet(engine)


@pytest.mark.parametrize("ok", [True, False])
def test_loaded_kv_is_continued_with_drafts(ok: bool) -> None:
    engine, runner = drafting(0.7)
    prompt = list(range(1, 12))
    request = load_request(engine, runner, prompt, ok)
    run_all(engine)
    assert request.output_token_ids == expected_tokens(prompt, 5)
    assert_quiet(engine)


def test_a_prefill_worker_drafts_nothing() -> None:
    engine = always(expected_tokens)
    request = engine.add_request(list(range(1, 10)), SamplingParams(max_tokens=5), prefill_only=True)
    [output] = engine.step().outputs
    assert (output.finish_reason, output.new_token_ids) == (
        FinishReason.PREFILLED,
        expected_tokens([*range(1, 10)], 1),
    )
    assert not request.drafts
    engine.kv.pool.release(engine.kv.detach(request, request.num_known_tokens - 1))
    assert_quiet(engine)


def test_swapped_requests_go_on_where_they_were_accepted() -> None:
    engine, runner = drafting(0.6, num_blocks=12, host_slots=24, swap=True, prefix_cache=False)
    run_swapped(engine)
    drafted, accepted = num_drafts(engine)
    rejected = drafted - accepted
    last_accepted = runner.num_computed_tokens - rejected - 4 * (5 + 19)
    assert -4 <= last_accepted <= 0  # nothing was computed twice; a last token that was a draft is computed


@settings(max_examples=75)
@given(
    data=st.data(),
    options=st.fixed_dictionaries(SMALL_ENGINES),
    accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    num_tokens=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_any_order_of_events_keeps_every_token(
    data: st.DataObject, options: dict[str, Any], accuracy: float, num_tokens: int, seed: int
) -> None:
    """New and resumed requests, aborts and steps in any order; drafts are right, wrong and half right."""
    engine, _ = drafting(accuracy, num_tokens, seed, **options, max_num_seqs=4)

    def add() -> tuple[Request, list[int]]:
        prompt = [data.draw(st.integers(0, 2))] * data.draw(st.integers(1, 10)) + [data.draw(st.integers(3, 5))]
        limit = data.draw(st.integers(1, 12))
        replayed = expected_tokens(prompt, data.draw(st.integers(0, limit - 1)))
        stops = (expected_tokens(prompt, limit)[-1],) if data.draw(st.booleans()) else ()
        params = SamplingParams(max_tokens=limit + len(stops), stop_token_ids=stops)
        request = engine.add_request(prompt, params, output_token_ids=replayed, priority=data.draw(st.integers(0, 2)))
        expected = expected_tokens(prompt, limit)
        if stops and stops[0] in expected[len(replayed) : -1]:
            expected = expected[: expected.index(stops[0], len(replayed)) + 1]
        return request, expected[len(replayed) :]

    check_any_order(engine, data, options["budget"], add)


def test_loads_wait_for_what_is_drafted_after_a_step() -> None:
    engine = always(expected_tokens)
    early: list[object] = []
    prompt = list(range(1, 12))
    engine.add_request(
        prompt, SamplingParams(max_tokens=5), output_token_ids=[1], kv_source="peer", num_source_tokens=len(prompt)
    )
    outcome = engine.step(early.extend)
    assert (early, [load.source for load in outcome.loads]) == ([], ["peer"])
