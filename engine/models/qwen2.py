"""Qwen2 and Qwen2.5: q, k and v always have a bias, the output projection never."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.layers.decoder import DecoderModel, OnLayer, build_decoder
from engine.layers.weights import WeightSource
from engine.models.config import ModelConfig
from engine.models.registry import register


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """A window that is declared but switched off (the default of this family) does not count."""
    window = config.sliding_window if raw.get("use_sliding_window", False) else None
    return replace(config, attention_bias=True, sliding_window=window)


@register("Qwen2ForCausalLM", adapt_config, gguf_name="qwen2")
def build(config: ModelConfig, weights: WeightSource, on_layer: OnLayer | None = None) -> DecoderModel:
    return build_decoder(config, weights, on_layer)
