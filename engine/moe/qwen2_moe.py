"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, and besides the chosen experts a shared one with a sigmoid gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from common.errors import UnsupportedModelError
from engine.layers.attention import Attention
from engine.layers.mlp import Mlp
from engine.layers.weights import WeightSource
from engine.models.config import ModelConfig
from engine.models.hf_config import positive
from engine.models.model import Embedding, Head, Part
from engine.models.registry import register
from engine.moe.config import MoeConfig
from engine.moe.hf_config import moe_from_hf
from engine.moe.layers import has_experts, of_layer
from engine.moe.moe import Moe


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """Count the shared expert as several of the others' size. Raises UnsupportedModelError for other sizes."""
    moe, size = experts_of(config, raw), positive(raw, "shared_expert_intermediate_size")
    if size % moe.intermediate_size:
        raise UnsupportedModelError(
            f"shared_expert_intermediate_size {size} is no multiple of moe_intermediate_size {moe.intermediate_size}"
        )
    moe = replace(moe, num_shared_experts=size // moe.intermediate_size, gates_shared=True)
    return replace(_with_window(config, raw), attention_bias=bool(raw.get("qkv_bias", True)), moe=moe)


def experts_of(config: ModelConfig, raw: Mapping[str, Any]) -> MoeConfig:
    """Every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""
    step = int(raw.get("decoder_sparse_step", 1))
    dense = {int(layer) for layer in raw.get("mlp_only_layers") or ()}
    dense |= {layer for layer in range(config.num_layers) if (layer + 1) % step}
    return replace(
        moe_from_hf(raw, "moe_intermediate_size"),
        normalizes_weights=bool(raw.get("norm_topk_prob", False)),
        dense_layers=tuple(sorted(dense)),
    )


def _with_window(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """Without `layer_types`, every other layer below `max_window_layers` has the window, if there is one."""
    if config.sliding_window is None or not raw.get("use_sliding_window", False):
        return replace(config, sliding_window=None, full_layers=())
    if raw.get("layer_types"):
        return config
    most = int(raw.get("max_window_layers", config.num_layers))
    return replace(
        config, full_layers=tuple(layer for layer in range(config.num_layers) if layer % 2 or layer >= most)
    )


@register("Qwen2MoeForCausalLM", adapt_config)
def qwen2_moe(config: ModelConfig, weights: WeightSource) -> Iterator[Part]:
    embedding = Embedding(config, weights, "model.embed_tokens")
    yield embedding
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield Attention(config, weights, f"{layer}.self_attn", f"{layer}.input_layernorm", index)
        feed_forward = Moe if has_experts(config, index) else Mlp
        yield feed_forward(of_layer(config, index), weights, f"{layer}.mlp", f"{layer}.post_attention_layernorm")
    yield Head(config, weights, "model.norm", "lm_head", embedding)
