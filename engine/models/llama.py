"""Llama and Mistral: the shared decoder as it is. Mistral's GGUF files call themselves `llama`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.layers.decoder import DecoderModel, OnLayer, build_decoder
from engine.layers.weights import WeightSource
from engine.models.config import ModelConfig
from engine.models.registry import register


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """`attention_bias` covers all four projections here."""
    bias = bool(raw.get("attention_bias", False))
    return replace(config, attention_bias=bias, attention_output_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))


@register("MistralForCausalLM", adapt_config)
@register("LlamaForCausalLM", adapt_config, gguf_name="llama", gguf_permuted=True)
def build(config: ModelConfig, weights: WeightSource, on_layer: OnLayer | None = None) -> DecoderModel:
    return build_decoder(config, weights, on_layer)
