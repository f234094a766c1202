"""`--simulated-steps`: real scheduling of steps that only take time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, EngineError
from common.grammar import grammar
from engine.assembly import assemble
from engine.simulated.step_cost import SimulatedCost
from mini_infer import LLM, SamplingParams
from tests.engine.combinations import MODELS, PROMPTS
from tests.engine.driving import answers, engine_config


def make(steps: str, **settings: object) -> LLM:
    return LLM("dry-run", simulated_steps=steps, num_gpu_blocks=256, num_threads=1, **settings)


def test_steps_last_as_long_as_they_cost_and_are_planned_while_others_run() -> None:
    llm = make("base=0.004,prompt_token=0.0002")
    began = time.monotonic()
    [result] = llm.generate("x" * 50, SamplingParams(max_tokens=21, ignore_eos=True))
    assert len(result.token_ids) == 21
    # 50 prompt tokens and 20 decode steps; the last of two in flight is of no use. Noise is 3% downwards.
    assert time.monotonic() - began > 0.97 * (0.01 + 20 * 0.004)


def test_a_request_keeps_its_tokens_wherever_it_goes_on() -> None:
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    [whole] = make("base=0.0001,row=0.0001").generate("hello", params)
    [again] = make("base=0.0001", max_num_batched_tokens=4, max_num_seqs=4).generate("hello", params)
    assert again.token_ids == whole.token_ids
    assert len(set(whole.token_ids)) > 3


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_mode": "int8-weight", "dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"itl_objective_ms": 50.0},
        {"preemption": "swap", "host_tier_gb": 0.01, "num_gpu_blocks": 16, "block_size": 4},
    ],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
@pytest.mark.slow
def test_settings_change_no_token(settings: dict[str, Any]) -> None:
    expected, _ = generate("dry-run")
    found, num_preemptions = generate("dry-run", **settings)
    assert found == expected
    assert ("preemption" in settings) == (num_preemptions > 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_models_of_all_kinds(name: str, tmp_path: Path) -> None:
    """In one step, and in steps of a few tokens with a small pool."""
    path = str(MODELS[name][0](tmp_path / "m"))
    expected, _ = generate(path)
    assert generate(path, max_num_batched_tokens=16)[0] == expected


def generate(model: str, **settings: Any) -> tuple[list[list[int]], int]:
    """Return the tokens of all prompts run at once, and the number of preemptions."""
    base = {"device": "cpu", "num_threads": 1, "num_gpu_blocks": 400, "max_num_seqs": 4}
    made = assemble(engine_config(model, **{**base, "simulated_steps": "base=0.0001", **settings})).engine
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    return answers(made, PROMPTS, params), made.load().num_preemptions


@pytest.mark.parametrize(
    "asked",
    [{"logprobs": 1}, {"prompt_logprobs": 1}, {"grammar": grammar.choice(["yes"])}, {"pooling": "last"}],
    ids=lambda asked: next(iter(asked)),
)
def test_what_is_not_computed_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="neither log-probabilities nor vectors nor grammars"):
        make("base=0.0001").generate("hello", SamplingParams(max_tokens=1, **asked))


@pytest.mark.parametrize(
    ("steps", "said"), [("bass=1", "base, row"), ("base", "NAME=SECONDS"), ("base=-1", "0 to 60")]
)
def test_costs_that_cannot_be_are_named(steps: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_config(simulated_steps=steps)


def test_prompt_tokens_hide_the_reading_of_weights() -> None:
    cost = SimulatedCost.parse("base=0.004,row=1e-5,prompt=0.0005,prompt_token=2e-5,weights=0.003")
    assert cost.seconds(0) == 0.0
    assert cost.seconds(10) == pytest.approx(0.0041)  # they are of its base
    assert [cost.seconds(0, tokens) for tokens in (50, 100)] == pytest.approx([0.0045, 0.0045])  # read for few, too
    assert cost.seconds(0, 1000) == pytest.approx(0.001 + 0.0205)
    assert cost.seconds(10, 100) == pytest.approx(0.0041 + 0.0005)
    assert cost.seconds(10, 1000) == pytest.approx(0.0041 + 0.0205 + 0.0002 - 0.003)  # its rows are computed, too
