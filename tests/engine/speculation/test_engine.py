"""Speculation on the CPU runner: the tokens of an engine without it, whatever drafts, parameters and pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.request import Request, RequestOutput
from tests.engine.driving import answers, num_drafts
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows
from tests.engine.speculation.opening import PLAIN, SETTINGS, open_parts, plain_run, run
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["llama", "deepseek-v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS[request.param].save(tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    ("settings", "accuracy"),
    [*((settings, 0.6) for settings in SETTINGS), (SETTINGS[0], 0.0), (SETTINGS[0], 1.0), (SETTINGS[-1], 1.0)],
    ids=str,
)
def test_no_draft_changes_an_answer(
    model: Path, settings: dict[str, object], accuracy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, plain_outputs = plain_run(model, **settings)
    known = [request.prompt_token_ids + request.output_token_ids for request in plain]
    draft_with(monkeypatch, MakeOracle(knows(known), accuracy, VOCAB_SIZE))
    made = open_parts(model, num_speculative_tokens=4, adaptive_drafts=False, **settings).engine
    for _ in range(2):  # the second time from the prefix cache
        requests, outputs = run(made)
        for request, expected in zip(requests, plain, strict=True):
            assert request.output_token_ids == expected.output_token_ids
            assert_equal_logprobs(request, outputs, expected, plain_outputs)
    drafted, accepted = num_drafts(made)
    assert drafted > 0
    assert accepted < drafted * 0.1 if accuracy == 0 else accepted > drafted * accuracy * 0.3
    if "preemption" in settings:
        assert made.load().num_preemptions > 0


def assert_equal_logprobs(
    request: Request, outputs: list[RequestOutput], expected: Request, expected_outputs: list[RequestOutput]
) -> None:
    found, told = (
        [entry for output in every if output.request is one for entry in output.logprobs]
        for one, every in ((request, outputs), (expected, expected_outputs))
    )
    asked = request.params.logprobs is not None
    assert [entry.token_id for entry in found] == (request.output_token_ids if asked else [])
    for entry, other in zip(found, told, strict=True):
        assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert entry.top_token_ids == other.top_token_ids


def test_a_repeated_text_is_drafted_from_the_prompt(model: Path) -> None:
    """The shipped drafter, chosen by the settings: a model that repeats itself is followed."""
    drafts = {"num_speculative_tokens": 4, "adaptive_drafts": False}
    plain, made = open_parts(model).engine, open_parts(model, **drafts).engine
    params = replace(PLAIN, max_tokens=60, allowed_token_ids=(20, 21))
    assert answers(plain, [[20, 21] * 10], params) == answers(made, [[20, 21] * 10], params)
    assert num_drafts(made)[1] > 20
    assert made.num_steps <= plain.num_steps - 20
