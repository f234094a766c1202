"""Models with sliding windows: equal to transformers, and blocks that no later query reads are freed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ConfigError, UnsupportedModelError
from engine.assembly import EngineParts, assemble
from engine.config import EngineConfig
from engine.kv_groups.manager import GroupedKVManager
from engine.loader.load import load_model
from engine.loader.random_weights import DRY_RUN_CONFIG
from engine.mla.config import LatentConfig
from engine.models.families import family_of
from engine.models.hf_config import config_from_hf
from engine.prefill_backends.refusals import check_attention
from engine.rope_scaling.scaling import Scaling
from engine.windows.layout import windowed_attention
from kvstore.layout import PoolGeometry
from tests.engine.conftest import Greedy
from tests.engine.driving import (
    GREEDY,
    directory,
    finish,
    generate,
    make_runner,
    num_drafts,
    open_model,
    random_prompt,
    serve,
)
from tests.engine.tiny_models import GEMMA3, SHAPE, TINY_MODELS, VOCAB_SIZE

pytestmark = pytest.mark.slow

NUM_TOKENS = 16
PROMPTS = [random_prompt(length, VOCAB_SIZE, length) for length in (1, 5, 20, 21, 22, 47, 60, 90)]
SCARCE = -1
SCARCE_BLOCKS = {"mistral-window": 14, "gemma3": 100, "gpt-oss": 42}  # hold the longest sequence, and not two of them
SETTINGS: list[dict[str, Any]] = [
    {"num_gpu_blocks": SCARCE, "preemption": "recompute"},  # in chunks of 16 tokens, too
    {"num_gpu_blocks": SCARCE, "preemption": "swap", "host_tier_gb": 0.01},
    {"num_speculative_tokens": 3, "adaptive_drafts": False, "ngram_min": 1},
    {"prefix_cache": False, "max_num_batched_tokens": 16},
]


class Family:
    """A saved model, and transformers' greedy tokens for all prompts."""

    def __init__(self, name: str, greedy: Greedy) -> None:
        self.name = name
        self.path, self.expected = greedy(TINY_MODELS[name], PROMPTS, NUM_TOKENS)

    def engine(self, **settings: Any) -> EngineParts:
        """An engine with blocks of 4 tokens."""
        base = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks": 1200, "block_size": 4}
        settings = {**base, **settings}
        if settings["num_gpu_blocks"] == SCARCE:
            settings |= {"num_gpu_blocks": SCARCE_BLOCKS[self.name], "max_num_batched_tokens": 16, "max_num_seqs": 8}
        return assemble(EngineConfig(str(self.path), **settings))


@pytest.fixture(scope="module", params=["mistral-window", "gemma3", "gpt-oss"])
def family(request: pytest.FixtureRequest, greedy: Greedy) -> Family:
    return Family(request.param, greedy)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_equals_transformers(family: Family, settings: dict[str, Any]) -> None:
    parts = family.engine(**settings)
    for _ in range(2 if settings.get("prefix_cache", True) else 1):  # the second time from the prefix cache
        requests = serve(parts.engine, PROMPTS, NUM_TOKENS)
        assert [request.output_token_ids for request in requests] == family.expected
    if "host_tier_gb" in settings:
        assert parts.engine.figures()["mini_infer_host_tier_hit_tokens"][0] > 0
    if "preemption" in settings:
        assert parts.engine.load().num_preemptions > 0
    elif settings.get("prefix_cache", True):
        assert requests[-1].num_cached_tokens == 88
    if "num_speculative_tokens" in settings:
        drafted, accepted = num_drafts(parts.engine)
        assert drafted > accepted


@pytest.mark.parametrize("loads", ["whole", "behind a cached prefix", "failing"])
def test_a_prompt_goes_on_over_the_live_blocks_of_another_engine(family: Family, loads: str) -> None:
    """As between workers: the blocks of a lease are copied to the blocks that `schedule` has allocated."""
    prefill, decode = (family.engine(max_num_batched_tokens=32) for _ in range(2))
    prompt, expected = PROMPTS[-1], family.expected[-1]
    if loads != "whole":
        serve(decode.engine, [prompt[:50]], NUM_TOKENS)
    params = replace(GREEDY, max_tokens=NUM_TOKENS, ignore_eos=True)
    sent = prefill.engine.add_request(prompt, params, prefill_only=True)
    finish(prefill.engine)
    leased = prefill.engine.kv.detach(sent, sent.num_known_tokens - 1)
    kv = decode.engine.kv
    assert isinstance(kv, GroupedKVManager)
    windows = kv.groups.windows
    assert len(leased) == kv.num_blocks_to_load(len(prompt)) < kv.num_blocks_for(len(prompt))
    assert len(leased) == windows.count(0) * 23 + (len(windows) - windows.count(0)) * 6
    assert prefill.engine.kv.pool.num_used == len(leased)
    request = decode.engine.add_request(
        prompt, params, output_token_ids=sent.output_token_ids, kv_source="lease", num_source_tokens=len(prompt)
    )
    [job] = decode.engine.step().loads
    num_cached = windows.count(0) * 12 if loads != "whole" else 0
    assert len(job.positions) >= len(leased) - num_cached - (len(windows) - windows.count(0))
    if loads == "failing":
        decode.runner._pool[job.block_ids] = float("nan")
    else:
        decode.runner._pool[job.block_ids] = prefill.runner._pool[[leased[position] for position in job.positions]]
    decode.engine.finish_load(job, loads != "failing")
    finish(decode.engine)
    assert request.output_token_ids == expected
    prefill.engine.kv.pool.release(leased)
    for parts in (prefill, decode):
        parts.engine.kv.pool.check_integrity()
        assert parts.engine.kv.pool.num_used == 0


def test_the_text_model_of_a_checkpoint_that_sees_images(tmp_path: Path) -> None:
    """As Gemma-3 is published from 4B on: prefixed names, a nested config, weights that are not used here."""
    path = TINY_MODELS["gemma3"].save(tmp_path / "m")
    expected = logits_of(path)
    raw = json.loads((path / "config.json").read_text())
    text = {key: value for key, value in raw.items() if key not in ("architectures", "rms_norm_eps")}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    (path / "config.json").write_text(json.dumps({**outer, "text_config": {**text, "rms_norm_eps": 1e-5}}))
    weights = {f"language_model.{name}": weight for name, weight in load_file(path / "model.safetensors").items()}
    save_file({**weights, "vision_tower.x.weight": torch.zeros(2, 2)}, path / "model.safetensors")
    assert torch.equal(logits_of(path), expected)
    (path / "config.json").write_text(json.dumps(outer))
    with pytest.raises(ConfigError, match="text_config is not an object"):
        open_model(directory(path))


def logits_of(path: Path) -> Tensor:
    loaded, config = open_model(directory(path), dtype="float32")
    assert make_runner(loaded, config).attention_backend == "groups"
    return generate(loaded, config, PROMPTS[-1], chunk=90)[1][0]


def test_heads_that_gpu_kernels_do_not_take(tmp_path: Path) -> None:
    path = TINY_MODELS["gemma3"].save(tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match="heads of 12 numbers, which is no power of two, have no GPU"):
        load_model(directory(path), EngineConfig(str(path), quant_mode="none"), torch.device("cuda"))


def test_attention_backends_that_do_not_know_the_models_attention() -> None:
    windowed = replace(DRY_RUN_CONFIG, sliding_window=64)
    with pytest.raises(ConfigError, match="--attention-backend fa3 knows no sliding windows; use triton"):
        check_attention(windowed, "fa3")
    check_attention(windowed, "triton")
    check_attention(DRY_RUN_CONFIG, "fa3")
    with pytest.raises(ConfigError, match="--attention-backend cudnn does not take latent attention; use triton"):
        check_attention(replace(DRY_RUN_CONFIG, latent=LatentConfig(None, 512, 128, 64, 128)), "cudnn")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ({"hidden_activation": "gelu"}, "activation 'gelu' is not supported"),
    ],
)
def test_what_gemma_configs_may_not_ask_for(change: dict[str, Any], told: str) -> None:
    raw = {**SHAPE, **GEMMA3, "architectures": ["Gemma3ForCausalLM"], **change}
    with pytest.raises(UnsupportedModelError, match=told):
        family_of("Gemma3ForCausalLM").adapt_config(config_from_hf(raw), raw)


def test_old_spellings_of_gemma_configs() -> None:
    """A pattern instead of layer types, and rotary embedding in flat fields."""
    raw = {
        **SHAPE, **GEMMA3, "architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 3, "rope_theta": 5e5,
        "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    config = family_of("Gemma3ForCausalLM").adapt_config(config_from_hf(raw), raw)
    assert config.windows == (21, 21, 0, 21, 21, 0, 21)
    assert (config.rope.theta, config.rope.scaling) == (5e5, Scaling("linear", 8.0, original_max_position=256))
    assert config.local_rope == replace(config.rope, theta=2e4, scaling=None)


# -- KV groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([4096] * 32, [32]),  # Mistral-v0.1
        ([128, 0] * 12, [12, 12]),  # gpt-oss-20b
        ([*[1024] * 5, 0] * 5 + [1024] * 4, [5, *[5] * 5, 4]),  # Gemma-3-4b
        ([*[1024] * 5, 0] * 10 + [1024] * 2, [10, 9, 9, 9, 9, 8, 8]),  # Gemma-3-27b
        ([0] + [64] * 39, [1, 6, 6, 6, 6, 5, 5, 5]),  # padded where it must be
        ([0, 64, 32], [1, 1, 1]),
    ],
)
def test_layers_of_one_window_are_cut_into_groups_of_one_size(windows: list[int], sizes: list[int]) -> None:
    layout = windowed_attention(windows, 4, 8, "bfloat16")
    assert [len(group.layers) for group in layout.groups] == sizes
    reach = [group.window or math.inf for group in layout.groups]
    assert reach == sorted(reach, reverse=True)
    for layer, window in enumerate(windows):
        assert [group.window for group in layout.groups if layer in group.layers] == [window]
    geometry = PoolGeometry(layout, 10, 16, "f")
    assert geometry.block_shape == (max(sizes), 2, 4, 16, 8)
    assert layout.has_windows
