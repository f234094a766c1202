"""Scheduler, KV manager and pool together, against a runner that remembers what was written where."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ContextLengthError, InvalidRequestError
from engine.engine import DeviceLostError
from engine.request import FinishReason, Request, SamplingParams
from tests.engine.driving import finish
from tests.engine.fakes import VOCAB_SIZE, expected_tokens
from tests.engine.scheduling.engines import (
    SMALL_ENGINES,
    assert_quiet,
    check_any_order,
    groups_of,
    load_request,
    make_engine,
    run_all,
    run_swapped,
)


def test_one_request_in_chunks() -> None:
    engine, runner = make_engine(budget=8)
    prompt = list(range(1, 22))
    request = engine.add_request(prompt, SamplingParams(max_tokens=6))
    steps = []
    while engine.has_work():
        before = request.num_computed_tokens
        engine.step()
        steps.append(request.num_computed_tokens - before)
    assert steps == [8, 8, 5, 1, 1, 1, 1, 1]
    assert request.output_token_ids == expected_tokens(prompt, 6)
    assert runner.num_computed_tokens == 21 + 5
    assert_quiet(engine)


@pytest.mark.parametrize(
    ("length", "salts", "num_cached"),
    [(17, ("", ""), 16), (16, ("", ""), 12), (17, ("a", "b"), 0)],
    ids=["all full blocks", "never the last token", "other salts"],
)
def test_prefix_cache_computes_only_the_rest(length: int, salts: tuple[str, str], num_cached: int) -> None:
    engine, runner = make_engine()
    prompt = list(range(1, 1 + length))
    engine.add_request(prompt, SamplingParams(max_tokens=1), cache_salt=salts[0])
    run_all(engine)
    runner.num_computed_tokens = 0
    again = engine.add_request(prompt, SamplingParams(max_tokens=3), cache_salt=salts[1])
    run_all(engine)
    assert again.num_cached_tokens == num_cached
    assert runner.num_computed_tokens == length - num_cached + 2
    assert again.output_token_ids == expected_tokens(prompt, 3)


def test_an_adapter_that_the_engine_lacks_is_refused() -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match=r"serve no adapters \(--enable-lora\)") as refused:
        engine.add_request([1, 2], SamplingParams(max_tokens=1), adapter="poet")
    assert refused.value.param == "model"
    assert not engine.has_work()


@pytest.mark.wing("kvstore.tier")
@pytest.mark.parametrize("overlap", [False, True])
def test_swap_really_swaps(overlap: bool) -> None:
    engine, runner = make_engine(num_blocks=12, host_slots=24, swap=True, prefix_cache=False, overlap=overlap)
    run_swapped(engine)
    assert runner.num_computed_tokens == 4 * (5 + 19)  # nothing was computed twice


@pytest.mark.wing("kvstore.tier")
def test_host_tier_gives_evicted_prefixes_back() -> None:
    engine, runner = make_engine(num_blocks=8, host_slots=16)
    first = list(range(1, 18))
    engine.add_request(first, SamplingParams(max_tokens=1))
    run_all(engine)
    engine.add_request(list(range(500, 528)), SamplingParams(max_tokens=1))  # evicts the first prompt's blocks
    run_all(engine)
    runner.num_computed_tokens = 0
    again = engine.add_request(first, SamplingParams(max_tokens=2))
    run_all(engine)
    assert again.num_cached_tokens == 16
    assert runner.num_computed_tokens == 2
    assert again.output_token_ids == expected_tokens(first, 2)
    assert engine.kv.stats.hit_tokens == 16
    figures = engine.kv.figures()
    assert figures["mini_infer_host_tier_hit_tokens"] == [12]  # one block of four was still in the pool
    assert figures["mini_infer_host_tier_stored_blocks"][0] >= 4
    assert_quiet(engine)


def test_decode_rows_come_first_and_prompts_share_the_budget() -> None:
    engine, _ = make_engine(budget=8, num_blocks=64)
    engine.add_request([1, 2], SamplingParams(max_tokens=10))
    engine.step()
    engine.add_request(list(range(10, 40)), SamplingParams(max_tokens=2))
    plan = engine.step().plan
    assert [row.num_tokens for row in plan.rows] == [1, 7]
    assert [row.samples for row in plan.rows] == [True, False]


def test_ends() -> None:
    engine, _ = make_engine(eos=frozenset(range(VOCAB_SIZE)))
    stop = engine.add_request([1, 2, 3], SamplingParams(max_tokens=9))
    length = engine.add_request([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    ends = {output.request: output.finish_reason for output in finish(engine) if output.finish_reason}
    assert ends == {stop: FinishReason.STOP, length: FinishReason.LENGTH}
    assert [len(request.output_token_ids) for request in (stop, length)] == [1, 3]


@pytest.mark.wing("engine.logit_rules")
def test_min_tokens_put_an_end_off() -> None:
    engine, _ = make_engine(eos=frozenset(range(VOCAB_SIZE)))
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=9, min_tokens=4))
    assert [output.finish_reason for output in finish(engine)][-1] is FinishReason.STOP
    assert len(request.output_token_ids) == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_model_length_ends_a_request(overlap: bool) -> None:
    engine, _ = make_engine(num_blocks=4, overlap=overlap)  # 16 tokens
    request = engine.add_request([1] * 10, SamplingParams(max_tokens=100))
    run_all(engine)
    assert request.num_tokens == 16
    with pytest.raises(ContextLengthError, match="maximum context length is 16 tokens"):
        engine.add_request([1] * 16, SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([], SamplingParams()),
        ([VOCAB_SIZE], SamplingParams()),
        ([-1], SamplingParams()),
        ([1], SamplingParams(allowed_token_ids=(VOCAB_SIZE,))),
        ([1], SamplingParams(logit_bias=((-1, 1.0),))),
        ([1], SamplingParams(bad_words=((1, VOCAB_SIZE),))),
    ],
)
def test_token_ids_are_checked(prompt: list[int], params: SamplingParams) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError):
        engine.add_request(prompt, params)
    assert_quiet(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_failing_row_fails_alone(num_steps: int, overlap: bool) -> None:
    """num_steps: steps before the bad request arrives, when a step of the good ones is in flight."""
    engine, runner = make_engine(overlap=overlap)
    lengths = [4, 6, num_steps + 2]  # the last one ends about when the step fails
    good = [engine.add_request([1, 2, 3 + i], SamplingParams(max_tokens=n)) for i, n in enumerate(lengths)]
    runner.fail_on = {666}
    for _ in range(num_steps):
        engine.step()
    bad = engine.add_request([666, 2], SamplingParams(max_tokens=4))
    errors = {}
    while engine.has_work():
        for output in engine.step().outputs:
            if output.error:
                errors[output.request.request_id] = output.error
    assert list(errors) == [bad.request_id]
    assert "RuntimeError" in errors[bad.request_id]
    for index, (request, length) in enumerate(zip(good, lengths, strict=True)):
        assert request.output_token_ids == expected_tokens([1, 2, 3 + index], length)
    assert engine.num_failed_steps == 1
    assert_quiet(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lost_device_is_nobody_elses_failure(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends and a new one takes over; requests must not fail as if they were invalid."""
    engine, runner = make_engine(overlap=overlap)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))

    def fail(_plan: object) -> None:
        raise DeviceLostError("told to fail")

    monkeypatch.setattr(runner, "launch", fail)
    with pytest.raises(DeviceLostError):
        engine.step()


def test_replayed_tokens_continue_the_same_stream() -> None:
    engine, _ = make_engine()
    whole = expected_tokens([5, 6, 7], 10)
    request = engine.add_request([5, 6, 7], SamplingParams(max_tokens=10), output_token_ids=whole[:4])
    assert run_all(engine)[request.request_id] == whole[4:]


def test_a_step_is_planned_while_the_one_before_runs() -> None:
    """Only a stop token costs a wasted row; limits are known in advance."""
    engine, runner = make_engine(overlap=True)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=10))
    run_all(engine)
    assert runner.num_computed_tokens == 3 + 9
    assert runner.most_in_flight == 2
    stop = expected_tokens([1, 2, 3], 10)[4]
    runner.num_computed_tokens = 0
    again = engine.add_request([1, 2, 3], SamplingParams(max_tokens=10, stop_token_ids=(stop,)))
    run_all(engine)
    assert again.output_token_ids == expected_tokens([1, 2, 3], 5)
    assert runner.num_computed_tokens == 3 + 4 + 1
    assert_quiet(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_prefill_only_keeps_its_blocks_until_they_are_released(overlap: bool) -> None:
    engine, _ = make_engine(overlap=overlap)
    request = engine.add_request(list(range(1, 10)), SamplingParams(max_tokens=5), prefill_only=True)
    output = (engine.step().outputs or engine.step().outputs)[0]
    assert output.finish_reason is FinishReason.PREFILLED
    blocks = engine.kv.detach(request, request.num_known_tokens - 1)
    pool = engine.kv.pool
    assert len(blocks) == 3
    assert pool.num_used == 3
    pool.release(blocks)
    assert_quiet(engine)


@pytest.mark.parametrize("ok", [True, False])
def test_loaded_kv_is_used_or_recomputed(ok: bool) -> None:
    engine, runner = make_engine()
    prompt = list(range(1, 12))
    request = load_request(engine, runner, prompt, ok)
    run_all(engine)
    assert request.output_token_ids == expected_tokens(prompt, 5)
    assert runner.num_computed_tokens == (4 if ok else len(prompt) + 4)
    assert_quiet(engine)


def test_cached_prefix_is_not_pulled_again() -> None:
    engine, runner = make_engine()
    prompt = list(range(1, 12))
    load_request(engine, runner, prompt, ok=True)
    run_all(engine)
    engine.add_request(
        prompt,
        SamplingParams(max_tokens=2),
        output_token_ids=expected_tokens(prompt, 1),
        kv_source="peer",
        num_source_tokens=len(prompt),
    )
    [job] = engine.step().loads
    assert job.positions == []  # 8 of 11 tokens are cached, the last 3 cost less than a transfer
    run_all(engine)


def test_abort_while_loading_frees_blocks_only_after_the_load() -> None:
    engine, _ = make_engine()
    prompt = list(range(1, 12))
    request = engine.add_request(
        prompt, SamplingParams(max_tokens=5), output_token_ids=[1], kv_source="peer", num_source_tokens=11
    )
    [job] = engine.step().loads
    pool = engine.kv.pool
    assert engine.abort(request.request_id) is request
    assert pool.num_used == 3
    assert engine.abort(request.request_id) is None
    engine.finish_load(job, ok=True)
    assert (pool.num_used, engine.load().num_requests) == (0, 0)
    assert_quiet(engine)


@pytest.mark.wing("kvstore.tier")
@pytest.mark.wing("engine.windows")
@pytest.mark.wing("engine.custom_policies")
@settings(max_examples=75)
@given(
    data=st.data(),
    options=st.fixed_dictionaries({**SMALL_ENGINES, "overlap": st.booleans(), "num_stages": st.integers(1, 3)}),
    policy=st.sampled_from(["priority", "fcfs", "examples.scheduling_policy:ShortestPromptFirst"]),
    windows=st.sampled_from([(), (), (6,), (0, 5), (0, 0, 3, 9)]),
)
def test_any_order_of_events_keeps_every_token(
    data: st.DataObject, options: dict[str, Any], policy: str, windows: tuple[int, ...]
) -> None:
    """Arrivals, aborts and steps in any order: tokens are right, and no block is lost or owned twice."""
    from engine.custom_policies.load import named_order

    if windows:  # otherwise the longest sequence, of 23 tokens, does not fit
        options["num_blocks"] += groups_of(windows, options["budget"]).most_live(23) - 6
    options["overlap"] &= options["num_stages"] == 1
    engine, _ = make_engine(**options, max_num_seqs=4, order=named_order(policy), windows=windows)

    def add() -> tuple[Request, list[int]]:
        prompt = [data.draw(st.integers(0, 2))] * data.draw(st.integers(1, 14)) + [data.draw(st.integers(3, 5))]
        limit = data.draw(st.integers(1, 8))
        bad_words = data.draw(st.sampled_from([(), (), (), ((1, 2),)]))  # some need the host between steps
        params = SamplingParams(max_tokens=limit, bad_words=bad_words)
        request = engine.add_request(prompt, params, priority=data.draw(st.integers(0, 2)))
        return request, expected_tokens(prompt, limit)

    check_any_order(engine, data, options["budget"], add)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_steps_of_a_pipeline_are_even_and_leave_nobody_out(num_stages: int) -> None:
    """Requests come and go at random; each gets a token within two rounds."""
    engine, runner = make_engine(400, max_num_seqs=24, budget=64, num_stages=num_stages)
    draw = random.Random(num_stages)
    waited: dict[Request, int] = {}  # steps that ended since its last token
    sizes: list[float] = []
    for number in range(400):
        if len(waited) < 20:
            params = SamplingParams(max_tokens=draw.randint(1, 40), ignore_eos=True)
            waited[engine.add_request([number % 7 + 1] * draw.randint(1, 9), params)] = 0
        outcome = engine.step()
        for request in waited:
            waited[request] += 1
        for output in outcome.outputs:
            waited[output.request] = 0
            if output.finish_reason is not None:
                del waited[output.request]
        assert max(waited.values(), default=0) <= 2 * num_stages + 1
        num_decodes = sum(row.is_decode for row in outcome.plan.rows)
        sizes.append(num_decodes / max(len(waited), 1))
    assert runner.most_in_flight == num_stages
    assert sum(0.7 / num_stages < size < 1.3 / num_stages for size in sizes[100:]) > 0.8 * len(sizes[100:])
