"""The runner against transformers in float32: every family, chunking, batch composition, block order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.cpu.runner import CpuRunner
from engine.kv.memory import allocate_pool, pool_geometry
from engine.loader.load import LoadedModel
from kvstore.types import BlockId
from tests.engine.driving import GREEDY, Driver, directory, generate, make_runner, open_model, plan_of, random_prompt
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE, reference_greedy, reference_logits, with_wing

pytestmark = pytest.mark.slow

Opened = tuple[LoadedModel, EngineConfig, transformers.PreTrainedModel]


@pytest.fixture(scope="module", params=map(with_wing, sorted(TINY_MODELS)))
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_tiny(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_tiny("llama", tmp_path_factory)


def open_tiny(name: str, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    tiny = TINY_MODELS[name]
    reference = tiny.build()
    path = tiny.save(tmp_path_factory.mktemp("model") / name, reference)
    loaded, config = open_model(directory(path), dtype="float32", num_threads=1)
    return loaded, config, reference


def test_logits_and_greedy_tokens_equal_transformers(opened: Opened) -> None:
    loaded, config, reference = opened
    driver = Driver(make_runner(loaded, config), config)
    prompts = [random_prompt(length, VOCAB_SIZE, length) for length in (1, 7, 8, 30, 100)]
    requests = [driver.add(prompt, record_logits=True) for prompt in prompts]
    driver.finish(requests, num_tokens=6, chunk=13)
    for request in requests:
        tokens = request.prompt_token_ids + request.output_token_ids
        expected = reference_logits(reference, tokens)[request.num_prompt_tokens - 1 : -1]
        assert request.output_token_ids == expected.argmax(-1).tolist()
        torch.testing.assert_close(torch.stack(driver.logits[request.request_id]), expected, atol=1e-4, rtol=0)


def test_a_row_may_be_computed_twice(llama: Opened) -> None:
    """The engine runs a failed step's rows again, one by one."""
    loaded, config, reference = llama
    driver = Driver(make_runner(loaded, config), config)
    request = driver.add(random_prompt(12, VOCAB_SIZE, 5))
    driver.finish([request], 2, chunk=12)
    plan = plan_of([(request, 1)])
    once, twice = driver.runner.launch(plan).result(), driver.runner.launch(plan).result()
    assert once.token_ids == twice.token_ids
    assert once.token_ids[0] == reference_greedy(reference, request.prompt_token_ids, 3)[2:]


@pytest.mark.wing("engine.logprobs")
def test_logprobs_and_prompt_logprobs_equal_transformers(llama: Opened) -> None:
    loaded, config, reference = llama
    params = replace(GREEDY, logprobs=5, prompt_logprobs=3)
    for chunk in (7, 100):
        driver = Driver(make_runner(loaded, config), config)
        request = driver.add(random_prompt(90, VOCAB_SIZE, 9), params)
        driver.finish([request], 3, chunk)
        tokens = request.prompt_token_ids + request.output_token_ids
        expected = reference_logits(reference, tokens).log_softmax(-1)
        entries = [entry for result in driver.results for part in result.prompt_logprobs for entry in part]
        sampled = [entry for result in driver.results for part in result.logprobs for entry in part]
        assert [entry.token_id for entry in entries + sampled] == tokens[1:]
        for position, entry in enumerate(entries + sampled):
            row = expected[position]
            count = 3 if position + 1 < request.num_prompt_tokens else 5
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
            assert list(entry.top_token_ids) == row.topk(count).indices.tolist()
            assert list(entry.top_logprobs) == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)


def test_a_row_with_broken_logits_fails_alone(llama: Opened) -> None:
    loaded, config, reference = llama
    driver = Driver(make_runner(loaded, config), config)
    good, bad = driver.add(random_prompt(9, VOCAB_SIZE, 1)), driver.add(random_prompt(9, VOCAB_SIZE, 2))
    bad.block_ids, bad.num_computed_tokens = [BlockId(driver.free.pop()), BlockId(driver.free.pop())], 8  # NaN KV
    result = driver.step([(good, 9), (bad, 1)])
    assert result.errors == {0: "the model's output is not finite"}
    assert result.token_ids == [[], reference_greedy(reference, good.prompt_token_ids, 1)]


def test_a_pool_of_another_shape_is_refused(llama: Opened) -> None:
    loaded, config, _ = llama
    geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype)
    pool = allocate_pool(geometry, loaded.device)
    with pytest.raises(AssertionError, match="KV pool"):
        CpuRunner(loaded, pool.bfloat16(), None, config)
    with pytest.raises(AssertionError, match="KV pool"):
        CpuRunner(loaded, pool[:, :1], None, config)


def test_paths_are_not_needed_after_loading(tmp_path: Path) -> None:
    """Weights are copied out of their files: a checkpoint may be deleted or replaced under a running engine."""
    path = TINY_MODELS["llama"].save(tmp_path / "model")
    loaded, config = open_model(directory(path), dtype="float32")
    for file in path.iterdir():
        file.write_bytes(b"\xff" * file.stat().st_size)
    prompt = random_prompt(10, VOCAB_SIZE, 8)
    assert generate(loaded, config, prompt, 2, chunk=4)[0] == reference_greedy(
        TINY_MODELS["llama"].build(), prompt, 2
    )
