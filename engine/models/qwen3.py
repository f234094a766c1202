"""Qwen3 (dense): RMS norm over each head of q and k before the rotary embedding, biases only on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.layers.attention import Attention
from engine.layers.mlp import Mlp
from engine.layers.weights import WeightSource
from engine.models.config import ModelConfig
from engine.models.model import Embedding, Head, Part
from engine.models.qwen2 import with_optional_window
from engine.models.registry import register


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    config = with_optional_window(config, raw)
    return replace(config, qk_norm=True, attention_bias=bias, attention_output_bias=bias)


@register("Qwen3ForCausalLM", adapt_config, gguf_name="qwen3")
def qwen3(config: ModelConfig, weights: WeightSource) -> Iterator[Part]:
    embedding = Embedding(config, weights, "model.embed_tokens")
    yield embedding
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield Attention(config, weights, f"{layer}.self_attn", f"{layer}.input_layernorm", index)
        yield Mlp(config, weights, f"{layer}.mlp", f"{layer}.post_attention_layernorm")
    yield Head(config, weights, "model.norm", "lm_head", embedding)
