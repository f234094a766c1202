"""Gemma-3, text only: most layers have a window, norms before and after each block, scaled embeddings.

Checkpoints of multimodal models have the text model under other names; their other weights are not read. Norm weights
are stored minus one; they are kept in float32, which the sum needs. The queries' scale is folded into their norm's
weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional

from common.errors import ConfigError, UnsupportedModelError
from engine.layers.attention import Attention
from engine.layers.block import Step
from engine.layers.mlp import Mlp
from engine.layers.weights import WeightSource
from engine.models.config import ModelConfig
from engine.models.hf_config import positive, rope_from_hf
from engine.models.model import Embedding, Head, Part
from engine.models.registry import register
from engine.post_norms.post_norm import PostNormed

ACTIVATION = "gelu_pytorch_tanh"
TEXT_DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
}  # fmt: skip
NOT_SUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping")


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """Adapt the config: rotary embedding differs between layers with and without a window, in two spellings."""
    activation = raw.get("hidden_activation", ACTIVATION)
    wrong = [name for name in NOT_SUPPORTED if raw.get(name)]
    if activation != ACTIVATION or wrong:
        what = ", ".join(wrong) or f"activation {activation!r}"
        raise UnsupportedModelError(f"{what} is not supported in Gemma-3 (known: {ACTIVATION})")
    full_layers = config.full_layers
    if not raw.get("layer_types"):
        step = int(raw.get("sliding_window_pattern") or 6)
        full_layers = tuple(layer for layer in range(config.num_layers) if (layer + 1) % step == 0)
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    full = {"rope_theta": raw.get("rope_theta") or 1e6, **scaling, **rope.get("full_attention", {})}
    local = {"rope_theta": raw.get("rope_local_base_freq") or 1e4, **rope.get("sliding_attention", {})}
    max_position = config.max_position_embeddings
    scalar = positive(raw, "query_pre_attn_scalar") if "query_pre_attn_scalar" in raw else 256
    return replace(
        config,
        qk_norm=True,
        full_layers=full_layers,
        rope=rope_from_hf({"rope_parameters": full}, max_position),
        local_rope=rope_from_hf({"rope_parameters": local}, max_position),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
        attention_bias=bool(raw.get("attention_bias", False)),
        attention_output_bias=bool(raw.get("attention_bias", False)),
        query_scale=(config.head_dim / scalar) ** 0.5,
        embedding_scale=config.hidden_size**0.5,
    )


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model's config, with transformers' defaults for what published files leave out."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("config.json: text_config is not an object")
    outer = ("architectures", "eos_token_id", "bos_token_id", "quantization_config")
    return {**TEXT_DEFAULTS, **text, **{key: raw[key] for key in outer if key in raw}}


def adapt_multimodal(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    return replace(adapt_config(config, raw), unused_weights=("vision_tower.", "multi_modal_projector."))


def plus_one(norm: Tensor) -> Tensor:
    """Return the weight plus one, float32. Tensors without storage are not computed."""
    return norm if norm.is_meta else norm.float() + 1


@register("Gemma3TextModel", adapt_config)
@register("Gemma3ForCausalLM", adapt_config)
def gemma3(config: ModelConfig, weights: WeightSource) -> Iterator[Part]:
    return _parts(config, weights, "")


@register("Gemma3ForConditionalGeneration", adapt_multimodal, text_config=text_config)
def gemma3_multimodal(config: ModelConfig, weights: WeightSource) -> Iterator[Part]:
    return _parts(config, weights, "language_model.")


def _parts(config: ModelConfig, weights: WeightSource, prefix: str) -> Iterator[Part]:
    def post_normed(block: Attention | Mlp, name: str) -> PostNormed:
        block.norm = plus_one(block.norm)
        return PostNormed(block, plus_one(weights.take(f"{name}.weight", (config.hidden_size,))))

    embedding = Embedding(config, weights, f"{prefix}model.embed_tokens")
    yield embedding
    for index in range(config.num_layers):
        layer = f"{prefix}model.layers.{index}"
        attention = Attention(config, weights, f"{layer}.self_attn", f"{layer}.input_layernorm", index)
        assert attention.qk_norm is not None
        attention.qk_norm = plus_one(attention.qk_norm)
        if not attention.qk_norm.is_meta:
            attention.qk_norm[: config.num_heads] *= config.query_scale
        yield post_normed(attention, f"{layer}.post_attention_layernorm")
        mlp = GeluMlp(config, weights, f"{layer}.mlp", f"{layer}.pre_feedforward_layernorm")
        yield post_normed(mlp, f"{layer}.post_feedforward_layernorm")
    head = Head(config, weights, f"{prefix}model.norm", f"{prefix}lm_head", embedding)
    head.norm = plus_one(head.norm)
    yield head


class GeluMlp(Mlp):
    """y = W_down (gelu(W_gate x) * W_up x), with the tanh approximation of gelu."""

    is_gelu = True

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.gelu(gate, approximate="tanh") * up)
