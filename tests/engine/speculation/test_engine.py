"""Speculation on the CPU runner: the tokens of an engine without it, whatever drafts, parameters and pool."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from common.errors import ConfigError
from engine import LLM
from engine.assembly import EngineParts, assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, RequestOutput, SamplingParams
from tests.engine.driving import num_drafts
from tests.engine.speculation.drafters import FromStates, MakeOracle, draft_with, knows
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE

pytestmark = pytest.mark.slow

PLAIN = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PARAMS = [
    PLAIN,
    replace(PLAIN, temperature=1.0, seed=5),
    replace(PLAIN, temperature=0.8, seed=6, top_k=40, top_p=0.9, logprobs=3),
    replace(PLAIN, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
    replace(PLAIN, temperature=1.2, seed=7, presence_penalty=1.0, logprobs=0, prompt_logprobs=1),
    replace(PLAIN, logit_bias=((9, 2.0), (11, -5.0)), bad_words=((10,), (12, 13))),
    replace(PLAIN, allowed_token_ids=tuple(range(20, 40)), temperature=1.0, seed=8),
    replace(PLAIN, ignore_eos=False, min_tokens=9, stop_token_ids=tuple(range(8, 60))),
]
PROMPTS = [[(7 * i + 11 * j) % (VOCAB_SIZE - 8) + 8 for j in range(3 + 5 * i)] for i in range(len(PARAMS))]
SETTINGS = [
    {},
    {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    {"num_gpu_blocks": 34, "block_size": 4, "preemption": "recompute"},
    {"num_gpu_blocks": 34, "block_size": 4, "preemption": "swap", "host_tier_gb": 0.01},
]


@pytest.fixture(scope="module", params=["llama", "deepseek-v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS[request.param].save(tmp_path_factory.mktemp(request.param))


def open_parts(model: Path, **settings: object) -> EngineParts:
    base = {"model": str(model), "device": "cpu", "dtype": "float32", "num_gpu_blocks": 256, "num_threads": 1}
    return assemble(EngineConfig(**{**base, **settings}))  # type: ignore[arg-type]


def open_engine(model: Path, **settings: object) -> Engine:
    return open_parts(model, **settings).engine


def run(made: Engine) -> tuple[list[Request], list[RequestOutput]]:
    """All prompts, each with its parameters; what came of them in the order of the prompts."""
    requests = [made.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    outputs: list[RequestOutput] = []
    while made.has_work():
        outputs += made.step().outputs
        made.kv.pool.check_integrity()
    assert made.kv.pool.num_used == 0
    assert made.num_failed_steps == 0
    return requests, outputs


@cache
def plain_run(model: Path, **settings: object) -> tuple[list[Request], list[RequestOutput]]:
    """Without drafts."""
    return run(open_engine(model, **settings))


@pytest.mark.parametrize(
    ("settings", "accuracy"),
    [*((settings, 0.6) for settings in SETTINGS), (SETTINGS[0], 0.0), (SETTINGS[0], 1.0), (SETTINGS[-1], 1.0)],
    ids=str,
)
def test_no_draft_changes_an_answer(
    model: Path, settings: dict[str, object], accuracy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, plain_outputs = plain_run(model, **settings)
    answers = [request.prompt_token_ids + request.output_token_ids for request in plain]
    make_drafter = MakeOracle(knows(answers), accuracy, VOCAB_SIZE)
    draft_with(monkeypatch, make_drafter)
    made = open_engine(model, num_speculative_tokens=4, adaptive_drafts=False, **settings)
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
    plain, made = open_engine(model), open_engine(model, num_speculative_tokens=4, adaptive_drafts=False)
    params = replace(PLAIN, max_tokens=60, allowed_token_ids=(20, 21))
    requests = [one.add_request([20, 21] * 10, params) for one in (plain, made)]
    for one in (plain, made):
        while one.has_work():
            one.step()
    assert requests[0].output_token_ids == requests[1].output_token_ids
    assert num_drafts(made)[1] > 20
    assert made.num_steps <= plain.num_steps - 20


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_proposer_has_the_states_that_tokens_came_of(model: Path, batch_invariant: bool) -> None:
    parts = open_parts(
        model,
        num_speculative_tokens=2,
        adaptive_drafts=False,
        quant_mode="none",
        batch_invariant=batch_invariant,
        max_num_batched_tokens=16,
    )
    proposer = FromStates(model)
    parts.runner.propose_with(proposer)
    for prompt in PROMPTS:
        parts.engine.add_request(prompt, PLAIN)
    while parts.engine.has_work():
        parts.engine.step()
    assert proposer.num_found == len(PROMPTS) * PLAIN.max_tokens
    assert num_drafts(parts.engine)[0] > 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_speculative_tokens": -1}, "--num-speculative-tokens -1: choose"),
        ({"num_speculative_tokens": 2, "ngram_min": 0}, "--ngram-min 0"),
        ({"num_speculative_tokens": 2, "ngram_min": 3, "ngram_max": 2}, "--ngram-min 3 --ngram-max 2"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_say_so(settings: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM("dry-run", **settings)
