"""What config.json may say, in both of transformers' spellings, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, UnsupportedModelError
from engine.loader.random_weights import DRY_RUN_CONFIG
from engine.models.config import RopeConfig
from engine.models.families import family_of
from engine.models.hf_config import config_from_hf, read_hf_config

OLD_STYLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": [3, 4],
}


def test_old_and_new_spelling_mean_the_same() -> None:
    new = {key: value for key, value in OLD_STYLE.items() if key not in ("rope_theta", "torch_dtype")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    new["dtype"] = "bfloat16"
    config = config_from_hf(OLD_STYLE)
    assert config == config_from_hf(new)
    assert config.rope == RopeConfig(500000.0)
    assert (config.num_kv_heads, config.head_dim, config.eos_token_ids) == (4, 16, (3, 4))


def test_generation_config_decides_the_end_of_sequence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OLD_STYLE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert config_from_hf(read_hf_config(tmp_path)).eos_token_ids == (9,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1.0}))
    assert config_from_hf(read_hf_config(tmp_path)).eos_token_ids == (3, 4)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "architectures"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf({**OLD_STYLE, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"vocab_size": "many"},
        {"hidden_size": 0},
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        {"partial_rotary_factor": 0.2},
    ],
)
def test_shapes_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config_from_hf({**OLD_STYLE, **change})


def test_context_length() -> None:
    config = replace(DRY_RUN_CONFIG, max_position_embeddings=2048)
    assert config.context_length(0) == 2048
    assert config.context_length(100) == 100
    with pytest.raises(ConfigError, match="at most 2048"):
        config.context_length(2049)
    windowed = replace(config, sliding_window=512)
    assert windowed.context_length(0) == 2048
    assert windowed.windows == (512,) * config.num_layers


def test_windows_that_are_switched_off_do_not_count() -> None:
    raw = {**OLD_STYLE, "sliding_window": 128}
    assert config_from_hf({**raw, "layer_types": ["full_attention"] * 2}).sliding_window is None
    assert config_from_hf({**raw, "use_sliding_window": False}).sliding_window is None


@pytest.mark.wing("engine.windows")
def test_windows_are_read() -> None:
    raw = {**OLD_STYLE, "sliding_window": 128}
    assert config_from_hf(raw).sliding_window == 128
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        config_from_hf({**raw, "layer_types": ["chunked_attention", "sliding_attention"]})


@pytest.mark.wing("engine.qwen")
@pytest.mark.wing("engine.windows")
def test_windows_that_qwen_switches_off_do_not_count() -> None:
    raw = {**OLD_STYLE, "sliding_window": 128}
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        named = {**raw, "architectures": [architecture]}
        assert family_of(architecture).adapt_config(config_from_hf(named), named).sliding_window is None
        named["use_sliding_window"] = True
        num_layers = config_from_hf(raw).num_layers
        for first, windows in ((None, ()), (1, (0, *[128] * (num_layers - 1)))):
            named |= {} if first is None else {"max_window_layers": first}
            assert family_of(architecture).adapt_config(config_from_hf(named), named).windows == windows
        named["layer_types"] = ["sliding_attention", *["full_attention"] * (num_layers - 1)]
        windows = (128, *[0] * (num_layers - 1))
        assert family_of(architecture).adapt_config(config_from_hf(named), named).windows == windows
