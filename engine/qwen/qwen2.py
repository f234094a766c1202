"""Qwen2 and Qwen2.5, and MiMo-7B: q, k and v always have a bias, the output projection never."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import ModelConfig
from engine.models.llama import llama
from engine.models.registry import register


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    return replace(with_optional_window(config, raw), attention_bias=True)


def adapt_mimo(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """Its modules for multi-token prediction are read by `engine/speculation/mtp`."""
    return replace(adapt_config(config, raw), unused_weights=("model.mtp_layers.",))


def with_optional_window(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """A window that is declared but switched off (the default of this family) does not count.

    Where `layer_types` do not say so, layers before `max_window_layers` have none.
    """
    if config.sliding_window is None or not raw.get("use_sliding_window", False):
        return replace(config, sliding_window=None, full_layers=())
    if raw.get("layer_types"):
        return config
    num_full = min(int(raw.get("max_window_layers", config.num_layers)), config.num_layers)
    window = config.sliding_window if num_full < config.num_layers else None
    return replace(config, sliding_window=window, full_layers=tuple(range(num_full)) if window else ())


register("Qwen2ForCausalLM", adapt_config)(llama)
register("MiMoForCausalLM", adapt_mimo)(llama)
