"""Latent attention in its three forms: equal to each other and to transformers; the KV of a token in each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError, UnsupportedModelError
from common.model_files import resolve_model
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.kv.memory import kv_layout
from engine.loader.load import check_model, load_model
from engine.mla.deepseek import with_latent
from engine.models.config import ModelConfig
from engine.models.families import family_of
from engine.models.hf_config import config_from_hf
from kvstore.layout import PoolGeometry
from tests.engine.driving import Driver, directory, make_runner, open_model, random_prompt, serve
from tests.engine.tiny_models import DEEPSEEK, TINY_MODELS, VOCAB_SIZE, TinyModel, reference_answers, reference_logits

FORMS = ("absorbed", "latent", "naive")
PROMPTS = [random_prompt(length, VOCAB_SIZE, length) for length in (1, 9, 21, 22, 23, 24)]
NUM_TOKENS = 12
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
    "max_position_embeddings": 163840, "vocab_size": 102400,
}  # fmt: skip


def adapted(raw: dict[str, Any]) -> ModelConfig:
    return family_of(raw["architectures"][0]).adapt_config(config_from_hf(raw), raw)


def in_form(config: ModelConfig, form: str) -> ModelConfig:
    assert config.latent is not None
    return with_latent(config, replace(config.latent, form=form))


def test_bytes_per_token_of_v2_lite() -> None:
    """A tenth of what its 16 heads would take: 576 values a layer instead of 2 x 16 x 192."""
    config = adapted(V2_LITE)
    layouts = {form: kv_layout(in_form(config, form), torch.bfloat16) for form in FORMS}
    assert layouts["absorbed"] == layouts["latent"]
    assert str(layouts["absorbed"]) == "latent: 27 layers x 1 x 1 heads x 576 bfloat16"
    sizes = {form: PoolGeometry(layout, 1, 64, "").block_bytes // 64 for form, layout in layouts.items()}
    assert sizes["absorbed"] == 27 * 576 * 2 == 31_104
    assert sizes["naive"] == 27 * 2 * 16 * 192 * 2 == 331_776


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS["deepseek-v3"].save(tmp_path_factory.mktemp("model") / "v3")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = TINY_MODELS["deepseek-v3"].build()
    return reference_answers(model, PROMPTS, NUM_TOKENS)


def logits_of(path: Path, **settings: Any) -> list[Tensor]:
    """Return the logits after each prompt, computed in chunks that share steps with generated tokens."""
    loaded, config = open_model(directory(path), **{"dtype": "float32", "num_threads": 1, **settings})
    driver = Driver(make_runner(loaded, config), config)
    requests = [driver.add(prompt, record_logits=True) for prompt in PROMPTS]
    driver.finish(requests, num_tokens=NUM_TOKENS, chunk=11)
    return [torch.stack(driver.logits[request.request_id]).float() for request in requests]


@pytest.mark.slow
def test_checkpoints_with_rotary_halves_and_without_groups(tmp_path: Path) -> None:
    changes = {"rope_interleave": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
    tiny = TinyModel("DeepseekV3", {**DEEPSEEK, **changes})
    model, found = tiny.build(), logits_of(tiny.save(tmp_path / "m"))
    for prompt, logits in zip(PROMPTS, found, strict=True):
        expected = reference_logits(model, [*prompt, *logits.argmax(-1).tolist()])[len(prompt) - 1 : -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def config_of(form: str, model: str = "", **settings: Any) -> EngineConfig:
    return EngineConfig(model, mla=form, **settings)  # type: ignore[call-arg]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_engines_reuse_swap_and_recompute(path: Path, expected: list[list[int]], form: str) -> None:
    """Prefixes from the cache, chunks over cached context, blocks that go to the host tier and come back."""
    made = assemble(
        config_of(
            form, str(path), device="cpu", dtype="float32", num_threads=1, num_gpu_blocks=16, block_size=4,
            max_num_batched_tokens=16, max_num_seqs=6, preemption="swap", host_tier_gb=0.01,
        )
    ).engine  # fmt: skip
    for _ in range(2):
        requests = serve(made, PROMPTS, NUM_TOKENS)
        assert [request.output_token_ids for request in requests] == expected
    assert requests[-1].num_cached_tokens > 0
    assert made.load().num_preemptions > 0


@pytest.mark.slow
def test_forms_that_keep_the_same_have_the_same_fingerprint(path: Path) -> None:
    absorbed, latent, naive = (open_model(directory(path), mla=form)[0].fingerprint for form in FORMS)
    assert absorbed == latent != naive


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16", "quant_mode": "int8-weight"}, {"kv_cache_dtype": "fp8"}])
@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_and_kv_are_close(path: Path, form: str, settings: dict[str, str]) -> None:
    """Compares the logits after the prompt; generated tokens may differ."""
    exact, found = logits_of(path), logits_of(path, mla=form, **settings)
    for one, other in zip(exact, found, strict=True):
        assert float((one[0] - other[0]).norm() / one[0].norm()) < 0.12


@pytest.mark.slow
def test_other_forms_are_refused_on_gpus_before_weights_are_read(path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="--mla naive has no GPU kernels: use absorbed"):
        load_model(directory(path), config_of("naive", str(path), quant_mode="none"), torch.device("cuda"))


def test_a_form_for_a_model_without_latents_is_refused() -> None:
    """It is not ignored; the default form is accepted."""
    files = resolve_model("dry-run")
    with pytest.raises(ConfigError, match="--mla latent: LlamaForCausalLM has no latent attention; leave it out"):
        check_model(files, config_of("latent", "dry-run"))
    assert check_model(files, config_of("absorbed", "dry-run")).latent is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"topk_method": "other"}, "topk_method 'other'"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ({"topk_method": "group_limited_greedy", "n_group": 16}, "6 experts a token of 1 of 16 groups of 64 experts"),
        ({"topk_method": "group_limited_greedy", "n_group": 5}, "of 5 groups"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ({"v_head_dim": 256}, "wider than keys of 192"),
        ({"kv_lora_rank": None}, "kv_lora_rank must be a positive integer"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=told):
        adapted({**V2_LITE, **changes})
    with pytest.raises(ConfigError, match="--mla other"):
        config_of("other")
