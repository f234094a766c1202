"""Fingerprints, the dry-run model, resolved settings and int8 weights."""

from __future__ import annotations

import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from common.model_files import ModelFiles, resolve_model
from engine.config import EngineConfig
from engine.layers.linear import MAX_INT8_ROWS, Linear, int8, int8_weight, quantize_int8
from engine.layers.weights import Partition
from engine.loader.fingerprint import fingerprint
from engine.loader.random_weights import RandomWeights
from engine.quantization.conversion import resolve_quant_mode
from engine.quantization.cpu_linears import CpuLinears
from tests.engine.driving import Driver, directory, make_runner, open_model
from tests.engine.tiny_models import TINY_MODELS

DRY_RUN = ModelFiles("dry-run", "dry-run", Path())


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_equal_files_have_equal_fingerprints_and_others_not(tmp_path: Path) -> None:
    first = TINY_MODELS["llama"].save(tmp_path / "first")
    shutil.copytree(first, tmp_path / "second")
    loaded, _ = open_model(directory(first))
    assert open_model(directory(tmp_path / "second"))[0].fingerprint == loaded.fingerprint
    others = {
        loaded.fingerprint,
        open_model(directory(first), dtype="float32")[0].fingerprint,
        open_model(directory(first), quant_mode="none")[0].fingerprint,
        open_model(directory(first), load_format="dummy")[0].fingerprint,
    }
    weights = tmp_path / "second" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    others.add(open_model(directory(tmp_path / "second"))[0].fingerprint)
    assert len(others) == 5


@pytest.mark.wing("common.gguf")
def test_the_fingerprint_of_a_real_file_is_cheap() -> None:
    path = resolve_model("").path
    began = time.process_time()
    fingerprint({}, [path])
    assert time.process_time() - began < 0.3


def test_dry_run_output_is_lively_and_repeatable() -> None:
    loaded, config = open_model(DRY_RUN)
    assert (loaded.dtype, loaded.quant_mode) == (torch.float32, "none")
    prompts = [list(b"Hello"), list(b"What is the capital of France?"), [256, *b"abc"]]
    outputs = []
    for _ in range(2):
        driver = Driver(make_runner(loaded, config), config)
        requests = [driver.add(prompt) for prompt in prompts]
        driver.finish(requests, 60, chunk=16)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]
    for tokens in outputs[0]:
        assert len(set(tokens)) > 20


def test_dry_run_weights_are_the_same_in_every_type() -> None:
    """Workers on different devices may exchange KV when their fingerprints are equal, so their weights must be."""
    exact: Any = open_model(DRY_RUN)[0].model
    rounded: Any = open_model(DRY_RUN, dtype="bfloat16", quant_mode="none")[0].model
    last, rounded_last = exact.blocks[-1], rounded.blocks[-1]
    assert torch.equal(last.down.weight.bfloat16(), rounded_last.down.weight)


def test_quant_mode_is_resolved_or_refused() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    auto = EngineConfig()
    assert resolve_quant_mode(auto, torch.bfloat16, cpu) == "int8-weight"
    assert resolve_quant_mode(auto, torch.bfloat16, cpu, has_int4=True) == "int4-weight"
    assert resolve_quant_mode(auto, torch.float32, cpu) == "none"
    assert resolve_quant_mode(auto, torch.bfloat16, gpu) == "none"
    with pytest.raises(ConfigError, match="int8-weight"):
        resolve_quant_mode(EngineConfig(quant_mode="int8-weight"), torch.float32, cpu)
    assert resolve_quant_mode(EngineConfig(quant_mode="int4-weight"), torch.bfloat16, cpu) == "int4-weight"


@pytest.mark.parametrize("mode", ["fp8", "w8a8"])
def test_rounded_activations_need_a_gpu(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, gpu = EngineConfig(quant_mode=mode), torch.device("cuda")
    with pytest.raises(ConfigError, match="needs a GPU; on a CPU use int8-weight"):
        resolve_quant_mode(config, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ConfigError, match="needs --dtype bfloat16"):
        resolve_quant_mode(config, torch.float16, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ConfigError, match=r"this one has 7\.5; use int8-weight"):
        resolve_quant_mode(config, torch.bfloat16, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert resolve_quant_mode(config, torch.bfloat16, gpu) == mode


def test_blocks_are_quantized_while_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the last layer's weights are made, the first layer's are no longer held."""
    first: list[weakref.ref[Tensor]] = []
    plain_take = RandomWeights.take

    def take(self: RandomWeights, name: str, shape: tuple[int, ...], partition: Partition = Partition.NONE) -> Tensor:
        if name.startswith("model.layers.1."):
            assert all(each() is None for each in first)
        weight = plain_take(self, name, shape, partition)
        if name == "model.layers.0.mlp.down_proj.weight":
            first.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(RandomWeights, "take", take)
    open_model(DRY_RUN, dtype="bfloat16", quant_mode="int8-weight")
    assert first


def test_a_missing_gpu_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises(ConfigError, match="no CUDA device"):
        open_model(DRY_RUN, device="cuda")


def test_int8_rounding_is_within_half_a_step() -> None:
    weight = torch.randn(40, 64).bfloat16()
    weight[3] = 0
    quantized, scales = quantize_int8(weight)
    error = (quantized.float() * scales.float()[:, None] - weight.float()).abs()
    assert bool((error <= 0.51 * scales.float()[:, None]).all())
    assert int(quantized[3].abs().max()) == 0


@pytest.mark.parametrize("has_bias", [False, True])
def test_both_paths_of_int8_are_the_same_function(has_bias: bool) -> None:
    bias = torch.randn(96).bfloat16() if has_bias else None
    linear = CpuLinears(torch.bfloat16).of_plain(Linear(torch.randn(96, 64).bfloat16(), bias))
    x = torch.randn(MAX_INT8_ROWS + 1, 64).bfloat16()
    many, few = linear(x)[:-1], linear(x[:-1])
    exact = x[:-1].float() @ int8_weight(linear).float().T + (0 if bias is None else bias.float())
    for result in (many, few):
        torch.testing.assert_close(result.float(), exact, atol=0.15, rtol=0.02)
    assert not torch.equal(many, few)  # they are two paths, or this test shows nothing


@pytest.mark.parametrize("columns", [32, 40, 72])
def test_what_lies_behind_a_row_does_not_matter(columns: int) -> None:
    """torch's int8 GEMM reads beyond rows of x of other sizes than multiples of 16: a NaN there became the result."""
    linear = CpuLinears(torch.bfloat16).of_plain(Linear(torch.randn(48, columns).bfloat16()))
    assert (linear.gemm is int8) == (columns % 16 == 0)
    for _ in range(50):
        freed = [torch.full((columns + more,), float("nan"), dtype=torch.bfloat16) for more in range(64)]
        del freed
        assert bool(linear(torch.randn(1, columns).bfloat16()).isfinite().all())


def test_int8_weights_change_the_model_little() -> None:
    """Greedy tokens may differ; log-probabilities stay close to those of bfloat16 without quantization."""
    from dataclasses import replace

    from tests.engine.driving import GREEDY

    prompt = list(b"The capital of France is a place where people live")
    logprobs = []
    for mode in ("none", "int8-weight"):
        loaded, config = open_model(DRY_RUN, dtype="bfloat16", quant_mode=mode)
        driver = Driver(make_runner(loaded, config), config)
        request = driver.add(prompt, replace(GREEDY, prompt_logprobs=0))
        driver.finish([request], 1, chunk=64)
        logprobs.append(torch.tensor([entry.logprob for entry in driver.results[0].prompt_logprobs[0]]))
    spread = float(logprobs[0].std())
    assert float((logprobs[0] - logprobs[1]).abs().mean()) < 0.1 * spread
