"""GGUF files of every supported type and family against transformers on the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import ConfigError, UnsupportedModelError
from engine.gguf.fields import family_fields
from tests.engine.driving import generate, open_model, random_prompt
from tests.engine.gguf.gguf_experts import split_kv_b
from tests.engine.gguf.gguf_files import WIDE, files_of, write_gguf
from tests.engine.tiny_models import (
    DEEPSEEK,
    GEMMA3,
    GPT_OSS,
    LLAMA3_ROPE,
    PHI3_LONG,
    PHI3_SHORT,
    QWEN2_EXPERTS,
    QWEN3_EXPERTS,
    TINY_MODELS,
    VOCAB_SIZE,
    TinyModel,
    reference_greedy,
    reference_logits,
    rope,
)

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def check_against_transformers(path: Path, tiny: TinyModel, arch: str, kind: str, is_old: bool = False) -> None:
    model = tiny.build()
    held = write_gguf(path, model, arch, kind, is_old=is_old)
    model.load_state_dict(held)
    loaded, config = open_model(files_of(path), dtype="float32")
    assert loaded.config.eos_token_ids == (3,)
    prompt = random_prompt(30, VOCAB_SIZE, 1)
    tokens, logits = generate(loaded, config, prompt, 3)
    assert tokens == reference_greedy(model, prompt, 3)
    torch.testing.assert_close(logits[0], reference_logits(model, prompt)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type(kind: str, tmp_path: Path) -> None:
    check_against_transformers(tmp_path / "m.gguf", TinyModel("Llama", WIDE), "llama", kind)


GEMMA3_FULL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SHORT = PHI3_SHORT["rope_parameters"]
PHI3_SCALED = {"original_max_position_embeddings": 256, "rope_parameters": {**SHORT, "attention_factor": 1.1}}
DEEPSEEK_V2 = TINY_MODELS["deepseek-v2"]
# The files hold one mscale, because both are equal in published models.
DEEPSEEK_YARN = rope(
    "yarn", factor=4.0, mscale=0.8, mscale_all_dim=0.8, original_max_position_embeddings=64, beta_fast=4.0,
    beta_slow=2.0,
)  # fmt: skip
ONE_GROUP = {"n_group": 1, "topk_group": 1}
DEEPSEEK_V2_LITE = TinyModel("DeepseekV2", {**DEEPSEEK, **DEEPSEEK_YARN})
# Values of published models that files do not hold. Weights are small, so that few activations are clamped.
GPT_OSS_GIVEN = {"swiglu_limit": 7.0, "hidden_size": 64}
FAMILIES = {
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, "deepseek2"),
    "deepseek-v2-lite-old": (DEEPSEEK_V2_LITE, "deepseek2"),
    "deepseek-v2": (replace(DEEPSEEK_V2, changes={**DEEPSEEK_V2.changes, "attention_bias": False}), "deepseek2"),
    "deepseek-v3-old": (TinyModel("DeepseekV3", {**DEEPSEEK, **DEEPSEEK_YARN, **ONE_GROUP}), "deepseek2"),
    "deepseek-v3": (
        TinyModel("DeepseekV3", {**DEEPSEEK, **DEEPSEEK_YARN, "q_lora_rank": 24, "n_group": 4, "topk_group": 2}),
        "deepseek2",
    ),
    "llama-gqa": (TinyModel("Llama"), "llama"),
    "llama-tied": (TinyModel("Llama", {"tie_word_embeddings": True}), "llama"),
    "qwen2": (TinyModel("Qwen2"), "qwen2"),
    "qwen3": (TinyModel("Qwen3", {"head_dim": 12}), "qwen3"),
    "mistral": (TinyModel("Mistral", {"sliding_window": None}), "llama"),
    "gemma3": (TinyModel("Gemma3", GEMMA3), "gemma3"),
    "gemma3-scaled": (TinyModel("Gemma3", {**GEMMA3, "rope_parameters": GEMMA3_FULL}), "gemma3"),
    "phi3": (TinyModel("Phi3"), "phi3"),
    "phi3-long": (TinyModel("Phi3", {"tie_word_embeddings": True, **PHI3_LONG}), "phi3"),
    "phi3-short": (TinyModel("Phi3", PHI3_SCALED), "phi3"),
    "gpt-oss": (TinyModel("GptOss", {**GPT_OSS, **GPT_OSS_GIVEN}), "gpt-oss"),
    "mixtral": (TINY_MODELS["mixtral"], "llama"),
    "mixtral-old": (TINY_MODELS["mixtral"], "llama"),
    "qwen2moe": (TinyModel("Qwen2Moe", QWEN2_EXPERTS), "qwen2moe"),
    "qwen3moe": (TinyModel("Qwen3Moe", {**QWEN3_EXPERTS, "norm_topk_prob": True}), "qwen3moe"),
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family(name: str, tmp_path: Path) -> None:
    tiny, arch = FAMILIES[name]
    check_against_transformers(tmp_path / "m.gguf", tiny, arch, "F32", is_old=name.endswith("-old"))


def test_rope_factors_stretch_each_frequency(tmp_path: Path) -> None:
    """Llama 3.1's files have factors per frequency instead of a formula."""
    model = TinyModel("Llama", LLAMA3_ROPE).build()
    plain = 1.0 / 10000.0 ** (np.arange(0, 8, 2, dtype=np.float32) / 8)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 3
    write_gguf(tmp_path / "m.gguf", model, "llama", extra={"rope_freqs.weight": factors})
    loaded, config = open_model(files_of(tmp_path / "m.gguf"), dtype="float32")
    prompt = random_prompt(100, VOCAB_SIZE, 1)
    _, logits = generate(loaded, config, prompt, chunk=64)
    torch.testing.assert_close(logits[0], reference_logits(model, prompt)[-1], atol=1e-4, rtol=0)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    tiny, arch = FAMILIES["deepseek-v3"]
    model = tiny.build()
    model.config.num_nextn_predict_layers = 1
    norm = np.ones(48, np.float32)
    extra = {"blk.3.attn_norm.weight": norm, "blk.3.nextn.enorm.weight": norm}
    write_gguf(tmp_path / "m.gguf", model, arch, extra=extra)
    assert open_model(files_of(tmp_path / "m.gguf"))[0].config.num_layers == 3
    write_gguf(tmp_path / "m.gguf", model, arch, extra={"blk.2.nextn.enorm.weight": norm})
    with pytest.raises(ConfigError, match=r"unexpected: blk\.2\.nextn"):
        open_model(files_of(tmp_path / "m.gguf"))


@pytest.mark.parametrize("damage", ["one is missing", "another rank", "two dimensions"])
def test_pieces_that_do_not_fit_are_no_weight(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, arch = FAMILIES["deepseek-v3"]

    def damaged(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
        (k_name, k), (v_name, v) = split_kv_b(name, tensor, config).items()
        if damage == "one is missing":
            return {k_name: k}
        return {k_name: k[:, 1:] if damage == "another rank" else k.flatten(0, 1), v_name: v}

    monkeypatch.setattr("tests.engine.gguf.gguf_files.split_kv_b", damaged)
    write_gguf(tmp_path / "m.gguf", tiny.build(), arch)
    with pytest.raises(ConfigError, match=r"missing: .*kv_b_proj.*unexpected: blk\.0\.attn_k_b"):
        open_model(files_of(tmp_path / "m.gguf"))


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TinyModel("Llama", {"tie_word_embeddings": True}).build(), "gemma")
    with pytest.raises(
        UnsupportedModelError, match=r"'gemma'.*deepseek2.*llama, llama with experts, phi3, qwen2, qwen2moe, qwen3"
    ):
        open_model(files_of(tmp_path / "m.gguf"))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, TinyModel("Llama").build(), "llama")
    whole = path.read_bytes()
    for cut in (0, 3, 10, 40, 1000, 5000, len(whole) - 40):
        path.write_bytes(whole[:cut])
        with pytest.raises(ConfigError, match=r"m\.gguf"):
            open_model(files_of(path))


@pytest.mark.parametrize("pattern", [3, [True, True, False, True, True, False]])
def test_gemmas_windows_are_where_the_file_says(pattern: int | list[bool]) -> None:
    sizes = {
        "block_count": 6,
        "attention.head_count": 4,
        "embedding_length": 64,
        "attention.sliding_window_pattern": pattern,
    }
    metadata = {"general.architecture": "gemma3", **{f"gemma3.{key}": value for key, value in sizes.items()}}
    fields = family_fields(metadata, has_output_weight=False)
    if isinstance(pattern, int):
        assert fields["sliding_window_pattern"] == pattern
    else:
        assert [kind == "sliding_attention" for kind in fields["layer_types"]] == pattern
