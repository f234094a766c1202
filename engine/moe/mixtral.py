"""Mixtral: Llama's attention, and in every layer a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.layers.attention import Attention
from engine.layers.weights import WeightSource
from engine.models import llama
from engine.models.config import ModelConfig
from engine.models.model import Embedding, Head, Part
from engine.models.registry import register
from engine.moe.hf_config import moe_from_hf
from engine.moe.layers import of_layer
from engine.moe.moe import Moe

PROJECTIONS = ("w1", "w3", "w2")  # gate, up, down


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    return replace(llama.adapt_config(config, raw), moe=moe_from_hf(raw, "intermediate_size"))


@register("MixtralForCausalLM", adapt_config)
def mixtral(config: ModelConfig, weights: WeightSource) -> Iterator[Part]:
    embedding = Embedding(config, weights, "model.embed_tokens")
    yield embedding
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield Attention(config, weights, f"{layer}.self_attn", f"{layer}.input_layernorm", index)
        norm = f"{layer}.post_attention_layernorm"
        yield Moe(of_layer(config, index), weights, f"{layer}.block_sparse_moe", norm, PROJECTIONS)
    yield Head(config, weights, "model.norm", "lm_head", embedding)
