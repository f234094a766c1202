"""Steps of a pipeline as the scheduler plans them, against a runner that remembers what was written where."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from engine.engine import Engine
from engine.plan import StepPlan, StepResult
from engine.request import Request, SamplingParams
from tests.engine.fakes import VOCAB_SIZE, BlockMemoryRunner, FakeStep, expected_tokens
from tests.engine.test_scheduler import assert_quiet, make_engine, run_all


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_steps_of_a_pipeline_are_even_and_leave_nobody_out(num_stages: int, overlap: bool) -> None:
    """Requests come and go at random; a token for each of them in at most two rounds."""
    engine, runner = make_engine(400, max_num_seqs=24, budget=64, num_stages=num_stages, overlap=overlap)
    draw = random.Random(num_stages)
    waited: dict[Request, int] = {}  # steps that ended since its last token
    sizes: list[float] = []
    for number in range(400):
        if len(waited) < 20:
            params = SamplingParams(max_tokens=draw.randint(1, 40), ignore_eos=True)
            waited[engine.add_request([number % 7 + 1] * draw.randint(1, 9), params)] = 0
        outputs = engine.step()
        for request in waited:
            waited[request] += 1
        for output in outputs:
            waited[output.request] = 0
            if output.finish_reason is not None:
                del waited[output.request]
        assert max(waited.values(), default=0) <= 2 * num_stages + 1
        num_decodes = sum(row.is_decode for row in engine.last_plan.rows)
        sizes.append(num_decodes / max(len(waited), 1))
    assert engine.num_failed_steps == 0
    assert runner.most_in_flight == num_stages + overlap
    num_decodes = sum(row.is_decode for plan in runner.plans for row in plan.rows)
    assert runner.num_followed > 0.9 * num_decodes if overlap else runner.num_followed == 0
    assert sum(0.7 / num_stages < size < 1.3 / num_stages for size in sizes[100:]) > 0.8 * len(sizes[100:])


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_rows_of_a_pipeline_follow_tokens_that_the_host_does_not_know(num_stages: int) -> None:
    """Prompts in chunks, requests that give way, are swapped, end early or are cancelled, and steps without rows."""
    draw = random.Random(num_stages)
    num_followed = num_preemptions = num_without_rows = 0
    for _ in range(200):
        eos = frozenset(range(0, VOCAB_SIZE, draw.choice([7, VOCAB_SIZE])))
        engine, runner = make_engine(
            draw.randint(6, 10), host_slots=16, swap=draw.random() < 0.9, budget=draw.randint(6, 24),
            max_num_seqs=draw.randint(3, 6), eos=eos, overlap=True, num_stages=num_stages,
        )  # fmt: skip
        live: list[Request] = []
        for _ in range(draw.randint(10, 40)):
            if draw.random() < 0.4:
                prompt = [draw.randint(0, 2)] * draw.randint(1, 14)
                words = ((1, 2),) if draw.random() < 0.1 else ()  # the host has to know its tokens
                params = SamplingParams(max_tokens=draw.randint(1, 8), bad_words=words)
                live.append(engine.add_request(prompt, params, priority=draw.randint(0, 2)))
            if live and draw.random() < 0.03:
                engine.abort(live.pop(draw.randrange(len(live))).request_id)
            engine.step()
        run_all(engine)
        for request in live:
            expected = expected_tokens(request.prompt_token_ids, request.params.max_tokens)
            stop = next((index for index, token in enumerate(expected, 1) if token in eos), len(expected))
            assert request.output_token_ids == expected[:stop]
        assert engine.num_failed_steps == 0
        assert_quiet(engine)
        num_followed += runner.num_followed
        num_preemptions += engine.scheduler.num_preemptions
        num_without_rows += sum(not plan.rows for plan in runner.plans)
    assert min(num_followed, num_preemptions, num_without_rows) > 20


def test_a_request_whose_tokens_the_host_must_know_does_not_hold_up_a_pipeline() -> None:
    """It is in a round's steps as before, and the others follow tokens that the host does not know."""
    engine, runner = make_engine(100, num_stages=2, overlap=True)
    for index in range(4):
        words = ((1, 2),) if index == 0 else ()
        engine.add_request([index] * 3, SamplingParams(max_tokens=30, bad_words=words))
    for _ in range(4):
        engine.step()
    runner.num_followed = 0
    for _ in range(20):
        engine.step()
        assert len(runner.in_flight) == 2  # and a third one, until its result was read
    assert runner.num_followed > 15


class TimedPipeline:
    """Counts how long the first stage waits. All stages take as long for each step, and the host HOST of that."""

    HOST = 0.2

    def __init__(self, runner: BlockMemoryRunner) -> None:
        self.runner = runner
        self.max_steps_in_flight = runner.max_steps_in_flight
        self.now = 0.0
        self.free_at = [0.0] * runner.num_stages
        self.ends = [0.0]  # of steps
        self.waited = 0.0

    def launch(self, plan: StepPlan) -> TimedStep:
        self.now += self.HOST
        sampled_by = [self.runner.last_token.get(row.request_id, (0, 0))[0] for row in plan.rows]
        begin = max(self.now, self.ends[max(sampled_by)])
        self.waited += max(begin - self.free_at[0], 0.0)
        for stage, free_at in enumerate(self.free_at):
            begin = self.free_at[stage] = max(begin, free_at) + 1.0
        self.ends.append(begin)
        return TimedStep(self, self.runner.launch(plan), begin)

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        return self.runner.needs_known_tokens(plan)

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class TimedStep:
    """A step that ends at a moment of its pipeline's clock."""

    pipeline: TimedPipeline
    step: FakeStep
    end: float

    def result(self) -> StepResult:
        self.pipeline.now = max(self.pipeline.now, self.end)
        return self.step.result()


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_first_stage_does_not_wait_for_the_host(num_stages: int) -> None:
    """Where rows follow tokens that the host does not know; else the host's time is lost in every round."""
    waited = {}
    for overlap in (False, True):
        made, runner = make_engine(400, max_num_seqs=24, budget=64, num_stages=num_stages, overlap=overlap)
        pipeline = TimedPipeline(runner)
        engine = Engine(made.scheduler, pipeline, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
        for index in range(3 * num_stages + 1):
            engine.add_request([index] * 5, SamplingParams(max_tokens=60))
        while engine.num_ended < 20:
            engine.step()
        before, num_steps = pipeline.waited, engine.num_steps
        while engine.num_ended < 40 * num_stages:
            engine.step()
        waited[overlap] = (pipeline.waited - before) / ((engine.num_steps - num_steps) / num_stages)  # in a round
    assert waited[False] > 0.9 * TimedPipeline.HOST
    assert waited[True] == pytest.approx(0.0, abs=1e-6)
