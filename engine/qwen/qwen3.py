"""Qwen3 (dense): RMS norm over each head of q and k before the rotary embedding, biases only on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import ModelConfig
from engine.models.llama import llama
from engine.models.registry import register
from engine.qwen.qwen2 import with_optional_window


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    config = with_optional_window(config, raw)
    return replace(config, qk_norm=True, attention_bias=bias, attention_output_bias=bias)


register("Qwen3ForCausalLM", adapt_config)(llama)
