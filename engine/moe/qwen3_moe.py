"""Qwen3 with experts: Qwen3's attention, and in the layers that the config names a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.layers.attention import Attention
from engine.layers.mlp import Mlp
from engine.layers.weights import WeightSource
from engine.models import qwen3
from engine.models.config import ModelConfig
from engine.models.model import Embedding, Head, Part
from engine.models.registry import register
from engine.moe.moe import Moe
from engine.moe.qwen2_moe import experts_of


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    moe = experts_of(config, raw)
    config = qwen3.adapt_config(config, raw)
    if raw.get("use_sliding_window", False):  # of all layers, in this family
        config = replace(config, sliding_window=raw.get("sliding_window"), full_layers=())
    return replace(config, moe=moe)


@register("Qwen3MoeForCausalLM", adapt_config, gguf_name="qwen3moe")
def qwen3_moe(config: ModelConfig, weights: WeightSource) -> Iterator[Part]:
    embedding = Embedding(config, weights, "model.embed_tokens")
    yield embedding
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield Attention(config, weights, f"{layer}.self_attn", f"{layer}.input_layernorm", index)
        feed_forward = Moe if config.has_experts(index) else Mlp
        yield feed_forward(config.of_layer(index), weights, f"{layer}.mlp", f"{layer}.post_attention_layernorm")
    yield Head(config, weights, "model.norm", "lm_head", embedding)
