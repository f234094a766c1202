"""Steps that wait for tokens, as drafts need, and steps that do not, in one answer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.config import GpuConfig
from engine.gpu.steps.decode_steps import LENGTH
from engine.plan import PendingStep, StepPlan
from engine.query_steps.inputs import NUM_FIELDS, ROW, TOKEN, are_last_tokens
from engine.speculation.overlap import Overlap
from tests.engine.driving import num_drafts
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows
from tests.gpu.models import save_tiny_model
from tests.gpu.speculation.test_drafts import MAX_TOKENS, assert_same_answers, run
from tests.gpu.test_engine import ON_GPU, open_gpu, reference

pytestmark = pytest.mark.wing("engine.speculation")


class Changing(Overlap):
    """Alternates every few steps between waiting and overlapping."""

    def decide(self, *_: object) -> None:
        self._num_steps += 1
        if self._num_steps % 3 == 0:
            self.waits = not self.waits


def test_tokens_do_not_depend_on_which_steps_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path)
    plain, told = run(reference(model))
    answers = [request.prompt_token_ids + request.output_token_ids for request in plain]
    draft_with(monkeypatch, MakeOracle(knows(answers), 0.7, 97), on_gpu=True)
    made, runner = open_gpu(model, monkeypatch, GpuConfig(), num_speculative_tokens=4, max_num_seqs=MAX_TOKENS)
    speculation = made._scheduler.speculation
    assert speculation is not None
    speculation._overlap = Changing(speculation._lengths)
    in_flight = []
    launch = runner.launch

    def counted(plan: StepPlan) -> PendingStep:
        in_flight.append(len(made._in_flight))
        return launch(plan)

    monkeypatch.setattr(runner, "launch", counted)
    assert_same_answers(run(made), (plain, told))
    assert num_drafts(made)[1] > 3
    assert 0 in in_flight[in_flight.index(1) :], "steps wait again after some that did not"


def test_the_last_token_of_each_row_is_found_on_the_device() -> None:
    device = "cuda" if ON_GPU else "cpu"
    draw = random.Random(4)
    for _ in range(50):
        queries, sampled, wanted = [], [], {}
        for row in draw.sample(range(20), draw.randrange(1, 6)):
            drafts = [draw.randrange(3) for _ in range(draw.randrange(4))]
            tokens = [draw.randrange(3) for _ in range(len(drafts) + 1)]
            queries += [(row, token, 9) for token in (7, *drafts)]
            right = next((k for k, draft in enumerate(drafts) if draft != tokens[k]), len(drafts))
            wanted[row] = tokens[right]
            sampled += tokens
        padding = draw.randrange(3)
        fields = torch.zeros(NUM_FIELDS, len(queries) + padding, dtype=torch.int32)
        for column, (row, token, length) in enumerate(queries):
            fields[ROW, column], fields[TOKEN, column], fields[LENGTH, column] = row, token, length
        given = torch.tensor(sampled + [0] * padding)
        on_device = fields.to(device)
        are_last = are_last_tokens(on_device, on_device[ROW].long(), given.to(device)).tolist()
        found = [(int(fields[ROW, index]), int(given[index])) for index, is_last in enumerate(are_last) if is_last]
        assert sorted(found) == sorted(wanted.items())
