"""8-bit KV cache: scales alone change nothing, and answers stay close."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.eight_bit_kv.scales import check_device, fold_kv_scales, kv_head_scales
from engine.kv.memory import pool_geometry
from engine.layers.attention import Attention
from engine.loader.load import LoadedModel
from tests.engine.driving import GREEDY, Driver, answers, directory, make_runner, open_model, random_prompt
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE, with_wing

NAMES = ("llama", "qwen2", "qwen3-biases", "gemma3")


@pytest.fixture(scope="module", params=map(with_wing, NAMES))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS[request.param].save(tmp_path_factory.mktemp("model") / request.param)


FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}


def opened(path: Path, dtype: str = "float32", kv_cache_dtype: str = "auto") -> tuple[LoadedModel, EngineConfig]:
    return open_model(directory(path), dtype=dtype, kv_cache_dtype=kv_cache_dtype, quant_mode="none", num_threads=1)


def attention_blocks(loaded: LoadedModel) -> list[Attention]:
    inner = [block.inner for block in loaded.model.blocks]
    return [block for block in inner if isinstance(block, Attention)]


def logits_of(loaded: LoadedModel, config: EngineConfig) -> Tensor:
    """Return the logits (2, vocab) of the token after each of two prompts, both computed in chunks."""
    driver = Driver(make_runner(loaded, config), config)
    requests = [driver.add(random_prompt(length, VOCAB_SIZE, length), record_logits=True) for length in (5, 40)]
    driver.finish(requests, num_tokens=1, chunk=16)
    return torch.stack([row for request in requests for row in driver.logits[request.request_id]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folded_scales_change_no_bit(path: Path, dtype: str) -> None:
    loaded, config = opened(path, dtype)
    want = logits_of(loaded, config)
    blocks = attention_blocks(loaded)
    before = kv_head_scales(blocks[0])
    for block in blocks:
        fold_kv_scales(block)
    assert torch.equal(logits_of(loaded, config), want)
    assert any(not bool((scales == 1).all()) for scales in before)  # something was scaled at all
    for scales in kv_head_scales(blocks[0]):
        assert torch.equal(scales, torch.ones_like(scales))


def test_values_far_from_one_survive_eight_bits(path: Path) -> None:
    """Without scales, V that is 2^-12 times as large would be stored as zeros."""
    loaded, config = opened(path)
    value_rows = slice(loaded.config.q_size + loaded.config.kv_size, None)
    with torch.inference_mode():
        for block in attention_blocks(loaded):
            block.qkv.weight[value_rows] *= 2.0**-12
            block.output.weight *= 2.0**12
            if block.qkv.bias is not None:
                block.qkv.bias[value_rows] *= 2.0**-12
    want = logits_of(loaded, config)
    fp8 = replace(config, **FP8)
    unscaled = logits_of(loaded, fp8)
    for block in attention_blocks(loaded):
        fold_kv_scales(block)
    scaled = logits_of(loaded, fp8)
    bound = 0.4 if "Gemma3" in loaded.config.architecture else 0.15  # whose large norms make errors grow
    assert float((scaled - want).norm() / want.norm()) < bound
    assert float((unscaled - want).norm() / want.norm()) > 0.3


def test_eight_bit_blocks_are_half_as_large_and_have_keys_of_their_own(path: Path) -> None:
    plain, config = opened(path, "bfloat16")
    loaded, fp8 = opened(path, "bfloat16", "fp8")
    wide = pool_geometry(plain.config, config, plain.fingerprint, plain.dtype)
    narrow = pool_geometry(loaded.config, fp8, loaded.fingerprint, loaded.dtype)
    assert narrow.dtype == "float8_e4m3fn"
    assert 2 * narrow.block_bytes == wide.block_bytes
    assert narrow.fingerprint != wide.fingerprint
    by_memory = replace(config, num_gpu_blocks=0, kv_cache_gb=0.01)
    doubled = pool_geometry(loaded.config, replace(by_memory, **FP8), "f", loaded.dtype).num_blocks
    assert doubled // 2 == pool_geometry(plain.config, by_memory, "f", plain.dtype).num_blocks


def test_a_gpu_without_the_conversion_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = replace(EngineConfig(), **FP8)
    with pytest.raises(ConfigError, match=r"8\.9"):
        check_device(config, torch.device("cuda"))
    check_device(config, torch.device("cpu"))
    check_device(EngineConfig(), torch.device("cuda"))


def test_cached_prefixes_and_chunks_give_the_same_tokens(path: Path) -> None:
    """A token attends to the values that the pool holds, however they got there."""
    outputs = []
    for max_num_batched_tokens in (64, 16):
        config = EngineConfig(
            str(path), device="cpu", dtype="float32", quant_mode="none", block_size=8,
            num_gpu_blocks=64, max_num_seqs=4, num_threads=1,
            max_num_batched_tokens=max_num_batched_tokens, **FP8,
        )  # fmt: skip
        engine = assemble(config).engine
        for _ in range(2):
            outputs += answers(engine, [random_prompt(40, VOCAB_SIZE, 1)], replace(GREEDY, max_tokens=6))
        assert engine.kv.stats.hit_tokens > 0
    assert outputs == [outputs[0]] * 4
