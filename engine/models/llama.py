"""Llama and Mistral: grouped-query attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.layers.attention import Attention
from engine.layers.mlp import Mlp
from engine.layers.weights import WeightSource
from engine.models.config import ModelConfig
from engine.models.model import Embedding, Head, Part
from engine.models.registry import register


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """Read the biases: `attention_bias` covers all four projections here."""
    bias = bool(raw.get("attention_bias", False))
    return replace(config, attention_bias=bias, attention_output_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))


@register("MistralForCausalLM", adapt_config)
@register("LlamaForCausalLM", adapt_config)
def llama(config: ModelConfig, weights: WeightSource) -> Iterator[Part]:
    """Yield the model's parts. Other families with these blocks differ only in their configs."""
    embedding = Embedding(config, weights, "model.embed_tokens")
    yield embedding
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield Attention(config, weights, f"{layer}.self_attn", f"{layer}.input_layernorm", index)
        yield Mlp(config, weights, f"{layer}.mlp", f"{layer}.post_attention_layernorm")
    yield Head(config, weights, "model.norm", "lm_head", embedding)
