"""gpt-oss: a window in every other layer, sinks, and experts with biases and a clamped activation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.layers.attention import Attention
from engine.layers.weights import Partition, WeightSource
from engine.models.config import ModelConfig
from engine.models.model import Embedding, Head, Part
from engine.models.registry import register
from engine.moe.hf_config import moe_from_hf
from engine.moe.layers import of_layer
from engine.moe.stacked_moe import StackedMoe


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", True))
    moe = replace(
        moe_from_hf(raw, "intermediate_size"),
        swiglu_alpha=float(raw.get("swiglu_alpha") or 1.702),
        swiglu_limit=float(raw.get("swiglu_limit") or 7.0),
    )
    full_layers = config.full_layers
    if not raw.get("layer_types"):
        full_layers = tuple(range(1, config.num_layers, 2))
    return replace(
        config,
        attention_bias=bias,
        attention_output_bias=bias,
        full_layers=full_layers,
        moe=moe,
    )


class AttentionWithSinks(Attention):
    """Attention with a sink for each head: one more score in the softmax, without a value."""

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str, norm: str, layer: int) -> None:
        super().__init__(config, weights, name, norm, layer)
        self.sinks = weights.take(f"{name}.sinks", (config.num_heads,), Partition.COLUMNS)


@register("GptOssForCausalLM", adapt_config)
def gpt_oss(config: ModelConfig, weights: WeightSource) -> Iterator[Part]:
    embedding = Embedding(config, weights, "model.embed_tokens")
    yield embedding
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield AttentionWithSinks(config, weights, f"{layer}.self_attn", f"{layer}.input_layernorm", index)
        yield StackedMoe(of_layer(config, index), weights, f"{layer}.mlp", f"{layer}.post_attention_layernorm")
    yield Head(config, weights, "model.norm", "lm_head", embedding)
