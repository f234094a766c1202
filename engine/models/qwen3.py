"""Qwen3 (dense): RMS norm over each head of q and k before the rotary embedding, biases only on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.layers.decoder import DecoderModel, OnLayer, build_decoder
from engine.layers.weights import WeightSource
from engine.models.config import ModelConfig
from engine.models.registry import register


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    window = config.sliding_window if raw.get("use_sliding_window", False) else None
    return replace(config, qk_norm=True, attention_bias=bias, attention_output_bias=bias, sliding_window=window)


@register("Qwen3ForCausalLM", adapt_config, gguf_name="qwen3")
def build(config: ModelConfig, weights: WeightSource, on_layer: OnLayer | None = None) -> DecoderModel:
    return build_decoder(config, weights, on_layer)
