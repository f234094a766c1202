"""Reads a model's config from a Hugging Face `config.json`.

Both of transformers' spellings are read (`rope_theta` or `rope_parameters`, `torch_dtype` or `dtype`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError, UnsupportedModelError
from common.wings import call_wing, require_wing
from engine.models.config import ModelConfig, RopeConfig, check_config


def read_hf_config(directory: Path) -> dict[str, Any]:
    """Read `config.json`, and from files next to it the end-of-sequence ids and the quantization."""
    raw = _read_json(directory / "config.json")
    call_wing("engine.quantization.config_files:add_quantization", raw, directory, _read_json)
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = _read_json(generation).get("eos_token_id")
        if eos is not None:
            raw["eos_token_id"] = eos
    return raw


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Translate a Hugging Face config. Raises UnsupportedModelError or ConfigError with the field's name."""
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation {activation!r} is not supported (known: silu)")
    num_heads = positive(raw, "num_attention_heads")
    hidden_size = positive(raw, "hidden_size")
    eos = raw.get("eos_token_id")
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    max_position = positive(raw, "max_position_embeddings")
    config = ModelConfig(
        architecture=architecture_of(raw),
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=positive(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        intermediate_size=positive(raw, "intermediate_size"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope_from_hf(raw, max_position),
        max_position_embeddings=max_position,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(int(token) for token in eos_ids),
        is_causal=is_causal(raw),
        **_windows(raw),
    )
    check_config(config)
    return config


def architecture_of(raw: Mapping[str, Any]) -> str:
    """Return the class name in `architectures`. Raises UnsupportedModelError if there is none."""
    names = raw.get("architectures") or []
    if not names:
        raise UnsupportedModelError("config.json names no architecture (field 'architectures')")
    return str(names[0])


def is_causal(raw: Mapping[str, Any]) -> bool:
    """Whether tokens attend only to earlier ones."""
    return raw.get("is_causal") is not False and not raw.get("use_bidirectional_attention")


def positive(raw: Mapping[str, Any], key: str) -> int:
    """Return a field that must be a positive integer. Raises ConfigError with its name."""
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def rope_from_hf(raw: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Read the rotary embedding from config.json. Raises ConfigError, UnsupportedModelError."""
    values = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = values.get("rope_type") or values.get("type") or "default"
    scaling = None
    if kind != "default":
        require_wing("engine.rope_scaling", f"rope scaling {kind!r}")
        from engine.rope_scaling.scaling import scaling_from_hf

        scaling = scaling_from_hf(kind, values, raw, max_position)
    theta = float(values.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    partial = float(raw.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0)
    return RopeConfig(theta, partial, scaling)


def _windows(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelConfig that describe the layers' windows, if there are any."""
    kinds = raw.get("layer_types")
    is_used = raw.get("use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    if raw.get("sliding_window") is None or not is_used:
        return {}
    require_wing("engine.windows", "a model with sliding windows")
    from engine.windows.hf_fields import windows_from_hf

    return windows_from_hf(raw, is_causal(raw))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be read: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} does not hold a JSON object")
    return value
