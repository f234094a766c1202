"""Vectors of prompts equal those of transformers' hidden states, however the prompts are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import InvalidRequestError
from engine.assembly import assemble
from engine.engine import Engine
from engine.plan import ScheduledRow, StepPlan
from engine.pooling.modules import VectorModules
from engine.request import FinishReason, Request, RequestId, SamplingParams
from tests.engine.driving import Driver, directory, engine_config, finish, make_runner, open_model, random_prompt
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE, with_wing

POOLED = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
MODELS = ["llama", "qwen2", "qwen3", with_wing("gemma3"), with_wing("qwen3-moe"), with_wing("deepseek-v2-lite")]
LENGTHS = (1, 2, 8, 9, 31, 60)


@torch.inference_mode()
def expected(name: str, prompts: Sequence[list[int]], pooling: str) -> list[Tensor]:
    """Compute vectors from transformers' last hidden states, without a cache."""
    model = TINY_MODELS[name].build()
    states = [model.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    return [{"last": each[-1], "cls": each[0], "mean": each.mean(dim=0)}[pooling] for each in states]


def prompts_of(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [random_prompt(length, VOCAB_SIZE, length) for length in lengths]


def saved(name: str, folder: Path) -> str:
    return str(TINY_MODELS[name].save(folder))


def engine(model: str, **settings: Any) -> Engine:
    settings = {"device": "cpu", "dtype": "float32", "num_gpu_blocks": 64, "block_size": 8, **settings}
    return assemble(engine_config(model, **settings)).engine


def run(
    made: Engine, prompts: Sequence[list[int]], pooling: str, adapter: str = ""
) -> tuple[list[Request], list[Tensor]]:
    params = replace(POOLED, pooling=pooling)
    requests = [made.add_request(prompt, params, adapter=adapter) for prompt in prompts]
    found = {output.request: output for output in finish(made)}
    ends = (FinishReason.LENGTH, FinishReason.STOP)
    assert all(output.finish_reason in ends and len(output.logprobs) == 1 for output in found.values())
    return requests, [torch.tensor(found[request].logprobs[0].top_logprobs) for request in requests]


def vectors(made: Engine, prompts: Sequence[list[int]], pooling: str) -> list[Tensor]:
    return run(made, prompts, pooling)[1]


def assert_close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("name", MODELS)
def test_equal_transformers(name: str, pooling: str, tmp_path: Path) -> None:
    """A batch runs in one step, then in chunks that end anywhere in a prompt."""
    prompts = prompts_of()
    wanted = expected(name, prompts, pooling)
    model = saved(name, tmp_path)
    for tokens_per_step in (256, 16):
        made = engine(model, max_num_batched_tokens=tokens_per_step)
        assert_close(vectors(made, prompts, pooling), wanted)


@pytest.mark.parametrize(("pooling", "num_cached"), [("last", [40, 32]), ("mean", [0, 0]), ("cls", [0, 0])])
def test_a_cached_prefix_changes_nothing(pooling: str, num_cached: list[int], tmp_path: Path) -> None:
    """`last` uses the cached prefix; the other poolings need hidden states of the tokens in it."""
    long = random_prompt(60, VOCAB_SIZE, 60)
    prompts = [long[:41] + [7] * 5, long[:33]]  # the last leaves a single token to compute
    made = engine(saved("llama", tmp_path))
    vectors(made, [long], pooling)
    requests, found = run(made, prompts, pooling)
    assert_close(found, expected("llama", prompts, pooling))
    assert [request.num_cached_tokens for request in requests] == num_cached


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.wing("kvstore.tier")
def test_survive_preemption(preemption: str, tmp_path: Path) -> None:
    """A prompt that is preempted between two of its chunks is computed again."""
    settings = {"host_tier_gb": 0.01} if preemption == "swap" else {}
    made = engine(
        saved("llama", tmp_path), num_gpu_blocks=9, max_num_batched_tokens=8, preemption=preemption, **settings
    )
    prompt = random_prompt(60, VOCAB_SIZE, 60)
    request = made.add_request(prompt, replace(POOLED, pooling="mean"), priority=1)
    while request.num_computed_tokens < 24:
        made.step()
    made.add_request(random_prompt(50, VOCAB_SIZE, 2), replace(POOLED, max_tokens=4), priority=0)
    found = [entry for output in finish(made) for entry in output.logprobs]
    assert request.num_preemptions > 0
    assert_close([torch.tensor(found[0].top_logprobs)], expected("llama", [prompt], "mean"))


def test_a_row_that_is_run_again_counts_once(tmp_path: Path) -> None:
    loaded, config = open_model(directory(TINY_MODELS["llama"].save(tmp_path)), dtype="float32")
    runner = make_runner(loaded, config)
    driver = Driver(runner, config)
    prompt = random_prompt(20, VOCAB_SIZE, 20)
    request = driver.add(prompt, replace(POOLED, pooling="mean"))
    driver.step([(request, 12)])
    runner.launch(StepPlan(rows=[ScheduledRow(request.request_id, 0, 12, False)])).result()
    [entry] = driver.step([(request, 8)]).logprobs[0]
    assert_close([torch.tensor(entry.top_logprobs)], expected("llama", [prompt], "mean"))


@pytest.mark.parametrize("changes", [{"max_tokens": 2}, {"logprobs": 0}])
def test_a_vector_has_one_token_to_travel_with(changes: dict[str, Any]) -> None:
    request = Request(RequestId("a"), [1], replace(POOLED, pooling="last", **changes))
    with pytest.raises(InvalidRequestError, match="pooling needs max_tokens 1, and no logprobs"):
        VectorModules().prepare_request(request)
