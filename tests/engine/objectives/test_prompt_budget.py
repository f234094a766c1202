"""Budget of prompt tokens in steps with decode rows, from measured steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from common.pairs import num_pairs
from common.step_times import StepCost
from engine.engine import Engine
from engine.objectives.prompt_budget import FIRST_TOKENS, PromptBudget, WaitingPrompt
from engine.plan import PlacedExperts, StepPlan, StepSize
from engine.request import FinishReason, Request, RequestStatus, SamplingParams
from tests.engine.driving import finish
from tests.engine.fakes import expected_tokens
from tests.engine.scheduling.engines import BLOCK, assert_quiet, make_engine, run_all

COST = StepCost(base=0.004, row=20e-6, prompt=0.0005, prompt_token=20e-6)
LONG = SamplingParams(max_tokens=40)


def learned(itl_objective: float = 0.025, cost: StepCost = COST) -> PromptBudget:
    budget, rng = PromptBudget(itl_objective), random.Random(1)
    for _ in range(300):
        rows, tokens = rng.randrange(1, 100), rng.randrange(64, 800)
        budget.times.observe(rows, 0, cost.seconds(rows))
        budget.times.observe(rows, tokens, cost.seconds(rows, tokens))
    return budget


def test_without_decode_rows_or_measurements_nothing_is_bounded_by_time() -> None:
    assert learned().num_tokens(0, 0, [WaitingPrompt(9000)], 8192) == 8192
    assert PromptBudget(0.025).num_tokens(4, 0, [WaitingPrompt(9000)], 8192) == FIRST_TOKENS
    assert PromptBudget(0.025).num_tokens(4, 0, [WaitingPrompt(9000)], 100) == 100


def test_prompts_take_what_the_objective_leaves() -> None:
    num_tokens = learned().num_tokens(50, 0, [WaitingPrompt(9000)], 8192)
    assert 0.02 < COST.seconds(50, num_tokens) < 0.025
    assert learned().num_tokens(50, 0, [WaitingPrompt(100)], 8192) == 100
    assert learned().num_tokens(500, 0, [WaitingPrompt(9000)], 8192) < num_tokens


def test_long_contexts_leave_room_for_fewer_tokens() -> None:
    true = StepCost(base=0.004, row=3e-6, context=14e-9, prompt=0.0005, prompt_token=20e-6, prompt_context=0.9e-9)
    budget, rng = PromptBudget(0.025), random.Random(1)
    for _ in range(400):
        rows, tokens = rng.randrange(1, 60), rng.randrange(64, 800)
        context, start = rng.randrange(500, 9000), rng.randrange(30_000)
        pairs = num_pairs(start, tokens)
        budget.times.observe(rows, 0, true.seconds(rows, context=rows * context), rows * context)
        seconds = true.seconds(rows, tokens, rows * context, pairs)
        budget.times.observe(rows, tokens, seconds, rows * context, pairs)
    sizes = []
    for context, start in ((8_000, 0), (160_000, 0), (160_000, 20_000)):
        waiting = WaitingPrompt(9000, start)
        sizes.append(budget.num_tokens(8, context, [waiting], 8192))
        seconds = true.seconds(8, sizes[-1], context, num_pairs(start, sizes[-1]))
        assert 0.019 < seconds < 0.025
    assert sizes[0] > sizes[1] + 50 > sizes[2] + 200
    two = [WaitingPrompt(100, 20_000), WaitingPrompt(9000)]
    assert sizes[2] < budget.num_tokens(8, 160_000, two, 8192) < sizes[1]


def test_chunks_do_not_shrink_where_that_makes_no_step_shorter() -> None:
    """A GPU whose host launches the kernels of prompts one by one after 8,192 tokens, in 20 ms."""
    true = StepCost(base=0.0055, row=3e-6, context=20e-9, prompt=0.0005, prompt_token=23e-6, prompt_context=0.7e-9)
    budget, rng = PromptBudget(0.025), random.Random(1)
    num_rows, context, num_computed, seconds = 10, 150_000, 0, 0.0
    for prompt in range(30):
        start, length = 0, 2_000 if prompt < 10 else 20_000
        while start < length:
            size = min(
                budget.num_tokens(num_rows, context, [WaitingPrompt(length - start, start)], 8192), length - start
            )
            pairs = num_pairs(start, size)
            took = true.seconds(num_rows, size, context, pairs) * rng.uniform(0.98, 1.03)
            if start + size > 8192:
                took = max(took, 0.020 * rng.uniform(1.0, 1.3))
            budget.times.observe(num_rows, size, took, context, pairs)
            budget.times.observe(num_rows, 0, true.seconds(num_rows, context=context), context)
            start, num_computed, seconds = start + size, num_computed + size, seconds + took
    assert num_computed / seconds > 8_000  # 64 tokens in each step would be 2,800


# -- in the scheduler ---------------------------------------------------------------------------------------------


class FixedBudget(PromptBudget):
    """Allows a fixed number of prompt tokens in steps with decode rows."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(1.0)
        self._num_tokens = num_tokens

    def num_tokens(self, num_decode_rows: int, context: int, prompts: object, most: int) -> int:
        return min(self._num_tokens, most) if num_decode_rows else most


def stepping(engine: Engine, request: Request) -> list[tuple[int, int]]:
    """Step until the request has a token. Returns (prompt tokens, decode tokens) of each step."""
    sizes = []
    while not request.output_token_ids:
        if (stats := engine.step().stats) is not None:
            sizes.append((stats.size.num_prompt_tokens, stats.size.num_decode_tokens))
    return sizes


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_with_decode_rows_take_few_prompt_tokens_and_others_many(overlap: bool) -> None:
    engine, _ = make_engine(64, budget=32, prompt_budget=FixedBudget(4), overlap=overlap)
    stream = engine.add_request(list(range(20)), LONG)
    assert max(size for size, _ in stepping(engine, stream)) == 20
    late = engine.add_request(list(range(100, 130)), LONG)
    assert {size for size in stepping(engine, late) if size[0]} <= {(4, 1), (2, 1)}
    tokens = run_all(engine)
    assert len(tokens) == 2
    for request in (stream, late):
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 40)
    assert_quiet(engine)


def test_the_last_token_of_a_prompt_is_no_stream() -> None:
    engine, _ = make_engine(64, budget=32, prompt_budget=FixedBudget(4))
    cached = list(range(8))
    engine.add_request(cached, SamplingParams(max_tokens=1))
    run_all(engine)
    engine.add_request([*cached, 9], SamplingParams(max_tokens=1))  # all but one token are cached
    engine.add_request(list(range(100, 120)), SamplingParams(max_tokens=1))
    stats = engine.step().stats
    assert stats is not None
    assert stats.size.num_prompt_tokens + stats.size.num_decode_tokens == 21
    run_all(engine)
    assert_quiet(engine)


def test_kv_of_a_peer_is_loaded_though_the_step_is_full() -> None:
    engine, _ = make_engine(64, budget=32, prompt_budget=FixedBudget(4))
    stepping(engine, engine.add_request(list(range(8)), LONG))
    engine.add_request(list(range(100, 130)), LONG, due=1e9)
    engine.step()  # the prompt takes all that there is for prompts
    pulled = engine.add_request(
        list(range(200, 212)), LONG, output_token_ids=[1], kv_source="peer", num_source_tokens=12, due=1.0
    )
    [job] = engine.step().loads
    assert pulled.status is RequestStatus.LOADING
    assert len(job.block_ids) == 12 // BLOCK
    engine.finish_load(job, ok=False)
    run_all(engine)
    assert_quiet(engine)


def test_a_load_that_the_cache_makes_needless_waits_for_the_next_step_when_this_one_is_full() -> None:
    engine, _ = make_engine(64, budget=32, prompt_budget=FixedBudget(4))
    cached = list(range(200, 212))
    engine.add_request(cached, SamplingParams(max_tokens=1))
    run_all(engine)
    stream = engine.add_request(list(range(8)), LONG)
    stepping(engine, stream)
    engine.add_request(list(range(100, 130)), LONG, due=1e9)
    engine.step()
    first = expected_tokens(cached, 1)
    again = engine.add_request(cached, LONG, output_token_ids=first, kv_source="peer", num_source_tokens=12, due=1.0)
    engine.step()
    assert again.status is RequestStatus.RUNNING
    run_all(engine)
    assert again.output_token_ids == expected_tokens(cached, 40)
    assert_quiet(engine)


def test_who_is_due_first_is_served_first_within_a_priority() -> None:
    engine, _ = make_engine(64, max_num_seqs=1)
    blocker = engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    engine.step()
    slack = engine.add_request([4, 5, 6], SamplingParams(max_tokens=2), due=50.0)
    at_risk = engine.add_request([7, 8, 9], SamplingParams(max_tokens=2), due=10.0)
    urgent = engine.add_request([1, 5, 9], SamplingParams(max_tokens=2), due=90.0, priority=-1)
    no_objective = engine.add_request([2, 5, 8], SamplingParams(max_tokens=2))
    ended = [output.request for output in finish(engine) if output.finish_reason]
    assert [r for r in ended if r is not blocker] == [urgent, at_risk, slack, no_objective]


class Seen(PromptBudget):
    """Records what it is asked and told."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.asked: list[tuple[int, int, list[WaitingPrompt]]] = []

    def num_tokens(self, num_decode_rows: int, context: int, prompts: Sequence[WaitingPrompt], most: int) -> int:
        self.asked.append((num_decode_rows, context, list(prompts)))
        return min(4, most)


def test_contexts_reach_the_budget_and_the_report() -> None:
    budget = Seen()
    engine, _ = make_engine(64, budget=32, prompt_budget=budget)
    stream = engine.add_request(list(range(20)), LONG)
    stepping(engine, stream)
    engine.add_request(list(range(100, 130)), LONG, due=7.0)
    first, second = engine.step().stats, engine.step().stats
    assert first is not None
    assert second is not None
    assert first.size.context == 21
    load = engine.load()
    assert (load.waiting_prefill_tokens, load.context_tokens) == (22, 23)
    assert load.waiting_prefill_pairs == sum(range(8, 30)) + 11  # half a pair more for each
    assert second.size.pairs == 4 * 4 + 8
    assert budget.asked[-1] == (1, 22, [WaitingPrompt(26, 4)])
    run_all(engine)
    assert_quiet(engine)
    without, _ = make_engine(64, budget=32)  # routers predict by contexts with and without a budget
    stepping(without, without.add_request(list(range(20)), LONG))
    stats = without.step().stats
    assert stats is not None
    assert without.load().context_tokens == stats.size.context + 1 == 22


def num_tokens(plan: StepPlan) -> int:
    return sum(row.num_tokens for row in plan.rows)


def test_steps_that_move_experts_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = learned()
    engine, runner = make_engine(64, budget=32, prompt_budget=budget)
    launch, observed, moved = runner.launch, list[int](), list[int]()

    def launch_and_move(plan: StepPlan) -> Any:
        if len(runner.plans) % 3 == 1:
            plan.placed = PlacedExperts(0, (0, 1))
            moved.append(num_tokens(plan))
        return launch(plan)

    monkeypatch.setattr(runner, "launch", launch_and_move)
    monkeypatch.setattr(budget.times, "observe", lambda rows, prompts, *_: observed.append(rows + prompts))
    engine.add_request([1, 2, 3], LONG)
    engine.add_request([4] * 40, LONG)
    run_all(engine)
    computed = sum(num_tokens(plan) for plan in runner.plans)
    assert moved
    assert sum(observed) == computed - sum(moved)


# -- handed over --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after", range(9))  # tokens: also those that fill a block of four
def test_a_request_is_handed_over_at_its_next_token(overlap: bool, after: int) -> None:
    engine, runner = make_engine(64, overlap=overlap)
    request = engine.add_request(list(range(20)), LONG)
    other = engine.add_request(list(range(30, 40)), LONG)
    while len(request.output_token_ids) < after:
        engine.step()
    engine.hand_over(request.request_id)
    ends: list[FinishReason | None] = []
    while not ends:
        ends = [
            output.finish_reason
            for output in engine.step().outputs
            if output.request is request and output.finish_reason
        ]
    assert ends == [FinishReason.PREFILLED]
    assert after < len(request.output_token_ids) <= after + 2
    known = request.prompt_token_ids + request.output_token_ids
    block_ids = engine.kv.detach(request, request.num_known_tokens - 1)
    stored = [token for block_id in block_ids for token in runner.blocks[block_id]]
    assert stored[: len(known) - 1] == known[:-1]  # the KV that a lease gives away
    assert len(block_ids) == -(-(len(known) - 1) // BLOCK)
    engine.kv.pool.release(block_ids)
    run_all(engine)
    assert other.output_token_ids == expected_tokens(other.prompt_token_ids, 40)
    assert_quiet(engine)


def test_handing_over_what_has_ended_or_never_was_does_nothing() -> None:
    engine, _ = make_engine(64)
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    run_all(engine)
    engine.hand_over(request.request_id)
    assert_quiet(engine)


def test_steps_are_compared_with_what_was_predicted() -> None:
    """Only steps of prompts with decode rows are compared, each once."""
    budget = learned()
    budget.figures()
    alone, beside = StepSize(4, 0, 100, 0), StepSize(4, 64, 100, 2080)
    for size in (alone, beside):
        budget.observe(size, 2 * budget.times.cost.seconds(4, size.num_prompt_tokens, size.context, size.pairs))
    [ratios] = budget.figures().values()
    assert ratios == pytest.approx([2.0])
    assert [*budget.figures().values()] == [[]]
