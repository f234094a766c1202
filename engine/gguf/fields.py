"""Fields that a family reads from `config.json` beyond the common ones, from GGUF metadata.

llama.cpp hard-codes some of them for an architecture; so does this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import ConfigError, UnsupportedModelError
from engine.models.families import ModelFamily
from engine.models.registry import FAMILIES, listed

SIGMOID = 2  # llama.cpp's number of this gating function; files without a number mean softmax
SIGMOID_DEEPSEEK = "deepseek2 with sigmoid scores"
GEMMA3_27B_LAYERS = 62  # the one size of Gemma-3 whose queries are not scaled by the width of a head
ARCHITECTURES = {  # Mistral's files call themselves `llama`
    "deepseek2": "DeepseekV2ForCausalLM",
    SIGMOID_DEEPSEEK: "DeepseekV3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama with experts": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
PERMUTED = ("llama", "llama with experts")  # whose q and k rows are in llama.cpp's interleaved rotary order


def family_of_gguf(name: str) -> tuple[ModelFamily, bool]:
    """The family of files with this `gguf_name`, and if their rows are permuted. Raises UnsupportedModelError."""
    known = {each: FAMILIES[other] for each, other in ARCHITECTURES.items() if other in FAMILIES}
    if name not in known:
        raise UnsupportedModelError(f"GGUF architecture {name!r} is not supported (known: {listed(known)})")
    return known[name], name in PERMUTED


def gguf_name(metadata: Mapping[str, Any]) -> str:
    """What `ARCHITECTURES` calls the file's, of which some are two families."""
    name = str(metadata.get("general.architecture"))
    if name == "deepseek2" and metadata.get("deepseek2.expert_gating_func") == SIGMOID:
        return SIGMOID_DEEPSEEK
    return f"{name} with experts" if name == "llama" and metadata.get("llama.expert_count") else name


def family_fields(metadata: Mapping[str, Any], has_output_weight: bool) -> dict[str, Any]:
    """Return the fields under their names in `config.json`, if the family needs any. Raises ConfigError."""
    name = gguf_name(metadata)
    if name == "gemma3":
        return _gemma3(metadata, has_output_weight)
    if name in ("qwen2moe", "qwen3moe"):
        fields = {
            **_experts(metadata, name),
            "moe_intermediate_size": _positive(metadata, f"{name}.expert_feed_forward_length"),
            "norm_topk_prob": name == "qwen3moe",
        }
        shared = f"{name}.expert_shared_feed_forward_length"
        return (
            fields
            if name == "qwen3moe"
            else {**fields, "shared_expert_intermediate_size": _positive(metadata, shared)}
        )
    if name == "gpt-oss":
        size = _positive(metadata, "gpt-oss.expert_feed_forward_length")
        return {**_experts(metadata, "gpt-oss"), "intermediate_size": size}
    if name in ("deepseek2", SIGMOID_DEEPSEEK):
        return _deepseek(metadata, name)
    if name == "llama with experts":
        size = _positive(metadata, "llama.feed_forward_length")
        return {**_experts(metadata, "llama"), "intermediate_size": size}
    return {}


def _gemma3(metadata: Mapping[str, Any], has_output_weight: bool) -> dict[str, Any]:
    def get(key: str, default: float) -> float:
        return float(metadata.get(f"gemma3.{key}") or default)

    full: dict[str, Any] = {"rope_theta": get("rope.freq_base", 1e6)}
    if metadata.get("gemma3.rope.scaling.type", "none") != "none":
        full |= {"rope_type": metadata["gemma3.rope.scaling.type"], "factor": get("rope.scaling.factor", 1.0)}
    fields: dict[str, Any] = {
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_theta": get("rope.freq_base_swa", 1e4)},
        },
        "tie_word_embeddings": not has_output_weight,
        "final_logit_softcapping": metadata.get("gemma3.final_logit_softcapping"),
    }
    pattern = metadata.get("gemma3.attention.sliding_window_pattern")
    if isinstance(pattern, int):  # one layer in this many has no window
        fields["sliding_window_pattern"] = pattern
    elif pattern is not None:  # whether each layer has a window
        fields["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
    heads, hidden = (_positive(metadata, f"gemma3.{key}") for key in ("attention.head_count", "embedding_length"))
    scalar = hidden // heads
    if metadata.get("gemma3.block_count") != GEMMA3_27B_LAYERS:
        scalar = int(get("attention.key_length", scalar))
    return {**fields, "query_pre_attn_scalar": scalar}


def _deepseek(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return DeepSeek's fields. Newer files store the latents' sizes as head sizes, and the heads' with the suffix
    `_mla`.

    Files without groups of experts choose among all of them, as in llama.cpp, even if the model has groups.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"deepseek2.{key}", default)

    is_sigmoid = name == SIGMOID_DEEPSEEK
    suffix = "_mla" if "deepseek2.attention.key_length_mla" in metadata else ""
    rope_dim = _positive(metadata, "deepseek2.rope.dimension_count")
    fields = {
        "q_lora_rank": get("attention.q_lora_rank"),
        "kv_lora_rank": _positive(metadata, "deepseek2.attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": _positive(metadata, f"deepseek2.attention.key_length{suffix}") - rope_dim,
        "v_head_dim": _positive(metadata, f"deepseek2.attention.value_length{suffix}"),
        "rope_scaling": {"mscale_all_dim": 10 * get("rope.scaling.yarn_log_multiplier", 0.0)},
        "num_nextn_predict_layers": get("nextn_predict_layers", 0),
        "first_k_dense_replace": get("leading_dense_block_count", 0),
    }
    if not get("expert_count"):
        return fields
    num_groups = get("expert_group_count", 1)
    return {
        **fields,
        "n_routed_experts": _positive(metadata, "deepseek2.expert_count"),
        "num_experts_per_tok": _positive(metadata, "deepseek2.expert_used_count"),
        "n_shared_experts": get("expert_shared_count", 0),
        "moe_intermediate_size": _positive(metadata, "deepseek2.expert_feed_forward_length"),
        "norm_topk_prob": get("expert_weights_norm", False),
        "routed_scaling_factor": get("expert_weights_scale", 1.0),
        "n_group": num_groups,
        "topk_group": get("expert_group_used_count", 1),
        "topk_method": "noaux_tc" if is_sigmoid else "greedy" if num_groups == 1 else "group_limited_greedy",
    }


def _experts(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    return {
        "num_experts": _positive(metadata, f"{arch}.expert_count"),
        "num_experts_per_tok": _positive(metadata, f"{arch}.expert_used_count"),
    }


def _positive(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"the GGUF file's {key} must be a positive integer, not {value!r}")
    return value
