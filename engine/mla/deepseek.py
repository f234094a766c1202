"""DeepSeek-V2 and DeepSeek-V3: multi-head latent attention, and experts after a few dense layers.

V2 scores experts by softmax, V3 by sigmoid plus a balancing bias; both may choose within groups.
`engine/speculation/mtp` reads the MTP modules that V3's checkpoints store after the last layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from common.errors import ConfigError, UnsupportedModelError
from engine.config import EngineConfig
from engine.layers.mlp import Mlp
from engine.layers.weights import WeightSource
from engine.mla.config import LatentConfig
from engine.mla.latent_attention import latent_attention
from engine.mla.settings import LatentSettings
from engine.models.config import ModelConfig
from engine.models.hf_config import positive
from engine.models.model import Embedding, Head, Part
from engine.models.registry import register
from engine.moe.config import MoeConfig, ScoreKind
from engine.moe.hf_config import moe_from_hf
from engine.moe.layers import has_experts, of_layer
from engine.moe.moe import Moe
from engine.rope_scaling.scaling import Scaling, yarn_mscale


def adapt_v2(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """Adapt the config: groups, if the config has any, are ranked by their best expert."""
    method = raw.get("topk_method") or "greedy"
    _check("topk_method", method, ("greedy", "group_limited_greedy"))
    moe = _moe(config, raw, "softmax", has_groups=method == "group_limited_greedy")
    return _adapt(config, raw, moe and replace(moe, group_top=1))


def adapt_v3(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """Adapt the config: groups are ranked by the sum of their two best experts."""
    _check("topk_method", raw.get("topk_method") or "noaux_tc", ("noaux_tc",))
    moe = _moe(config, raw, "sigmoid", has_groups=True)
    return _adapt(config, raw, moe and replace(moe, group_top=2, has_choice_bias=True))


def _adapt(config: ModelConfig, raw: Mapping[str, Any], moe: MoeConfig | None) -> ModelConfig:
    q_rank = raw.get("q_lora_rank")
    values = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    scaling, mscale_all_dim = config.rope.scaling, float(values.get("mscale_all_dim") or 0.0)
    latent = LatentConfig(
        q_lora_rank=None if q_rank is None else positive(raw, "q_lora_rank"),
        kv_lora_rank=positive(raw, "kv_lora_rank"),
        nope_head_dim=positive(raw, "qk_nope_head_dim"),
        rope_head_dim=positive(raw, "qk_rope_head_dim"),
        v_head_dim=positive(raw, "v_head_dim"),
        mscale=yarn_mscale(scaling.factor, mscale_all_dim) if isinstance(scaling, Scaling) else 1.0,
        rope_interleave=bool(raw.get("rope_interleave", True)),
    )
    bias = bool(raw.get("attention_bias", False))
    return replace(
        with_latent(config, latent),
        attention_bias=bias,
        attention_output_bias=bias,
        moe=moe,
        unused_weights=tuple(f"model.layers.{layer}." for layer in _all_layers(config, raw)[config.num_layers :]),
    )


def with_asked_form(config: ModelConfig, engine_config: EngineConfig) -> ModelConfig:
    """Return the config of a model with latent attention in the form that `--mla` names. Raises ConfigError."""
    assert config.latent is not None
    return with_latent(config, replace(config.latent, form=engine_config.of(LatentSettings).mla))


def with_latent(config: ModelConfig, latent: LatentConfig) -> ModelConfig:
    """Return the config with latent attention, and the pool's KV heads in its form. Raises ConfigError."""
    qk_dim = latent.nope_head_dim + latent.rope_head_dim
    if latent.rope_head_dim % 2:
        raise ConfigError(f"qk_rope_head_dim {latent.rope_head_dim} is odd, rotary embedding needs pairs")
    if latent.v_head_dim > qk_dim:
        raise ConfigError(f"values of {latent.v_head_dim} (v_head_dim) are wider than keys of {qk_dim}")
    if latent.form == "naive":
        return replace(config, latent=latent, num_kv_heads=config.num_heads, head_dim=qk_dim)
    return replace(config, latent=latent, num_kv_heads=1, head_dim=latent.kv_lora_rank + latent.rope_head_dim)


def _moe(config: ModelConfig, raw: Mapping[str, Any], score: ScoreKind, has_groups: bool) -> MoeConfig | None:
    """Read the experts, from layer `first_k_dense_replace` on in every `moe_layer_freq`-th; None without any."""
    if raw.get("n_routed_experts") is None:
        return None
    _check("scoring_func", raw.get("scoring_func") or score, (score,))
    first, step = int(raw.get("first_k_dense_replace") or 0), int(raw.get("moe_layer_freq") or 1)
    moe = replace(
        moe_from_hf(raw, "moe_intermediate_size"),
        normalizes_weights=bool(raw.get("norm_topk_prob", False)),
        dense_layers=tuple(layer for layer in _all_layers(config, raw) if layer < first or layer % step),
        num_shared_experts=int(raw.get("n_shared_experts") or 0),
        score=score,
        num_groups=positive(raw, "n_group") if has_groups else 1,
        num_chosen_groups=positive(raw, "topk_group") if has_groups else 1,
        weight_factor=float(raw.get("routed_scaling_factor", 1.0)),
        float32_router=True,
    )
    in_reach = moe.num_experts // moe.num_groups * moe.num_chosen_groups
    if moe.num_experts % moe.num_groups or not moe.num_experts_per_token <= in_reach <= moe.num_experts:
        raise ConfigError(
            f"config.json: {moe.num_experts_per_token} experts a token of {moe.num_chosen_groups} of "
            f"{moe.num_groups} groups of {moe.num_experts} experts"
        )
    return moe


def _all_layers(config: ModelConfig, raw: Mapping[str, Any]) -> range:
    """Return the model's layers, followed by those of MTP modules."""
    return range(config.num_layers + int(raw.get("num_nextn_predict_layers") or 0))


def _check(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnsupportedModelError(f"{key} {value!r} is not supported (known: {', '.join(known)})")


@register("DeepseekV2ForCausalLM", adapt_v2)
@register("DeepseekV3ForCausalLM", adapt_v3)
def deepseek(config: ModelConfig, weights: WeightSource) -> Iterator[Part]:
    embedding = Embedding(config, weights, "model.embed_tokens")
    yield embedding
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield latent_attention(config, weights, f"{layer}.self_attn", f"{layer}.input_layernorm", index)
        feed_forward = Moe if has_experts(config, index) else Mlp
        yield feed_forward(of_layer(config, index), weights, f"{layer}.mlp", f"{layer}.post_attention_layernorm")
    yield Head(config, weights, "model.norm", "lm_head", embedding)
