"""Phi-3, Phi-3.5 and Phi-4: q, k and v in one tensor, gate and up in another; part of each head may be rotated."""

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

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """Leave out a window that no context fills."""
    window = config.sliding_window
    return (
        config if window is None or window < config.max_position_embeddings else replace(config, sliding_window=None)
    )


@register("Phi3ForCausalLM", adapt_config, gguf_name="phi3", fused=FUSED)
def phi3(config: ModelConfig, weights: WeightSource) -> Iterator[Part]:
    embedding = Embedding(config, weights, "model.embed_tokens")
    yield embedding
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield Attention(config, weights, f"{layer}.self_attn", f"{layer}.input_layernorm", index)
        yield Mlp(config, weights, f"{layer}.mlp", f"{layer}.post_attention_layernorm")
    yield Head(config, weights, "model.norm", "lm_head", embedding)
