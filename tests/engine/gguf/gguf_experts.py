"""Tensors and metadata that llama.cpp's converter writes for mixtures of experts, today and in older files."""

from __future__ import annotations

from typing import Any

import gguf
import torch
from torch import Tensor


def expert_pieces(name: str, tensor: Tensor, is_old: bool) -> dict[str, Tensor]:
    """Split transformers' fused gate and up of experts; files of early 2024 have a tensor for each expert."""
    layer = f"blk.{name.split('.')[2]}"
    if name.endswith("down_proj"):
        found = {f"{layer}.ffn_down": tensor}
    else:
        gate, up = tensor.chunk(2, dim=1)
        found = {f"{layer}.ffn_gate": gate, f"{layer}.ffn_up": up}
    if not is_old:
        return {f"{module}_exps.weight": weights for module, weights in found.items()}
    return {f"{module}.{index}.weight": one for module, weights in found.items() for index, one in enumerate(weights)}


def gpt_oss_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split gate and up, which are interleaved in transformers' weights (experts, in, out)."""
    layer = f"blk.{name.split('.')[2]}"
    kind = "bias" if name.endswith("_bias") else "weight"
    rows = tensor if kind == "bias" else tensor.transpose(1, 2)
    if "down_proj" in name:
        return {f"{layer}.ffn_down_exps.{kind}": rows}
    return {f"{layer}.ffn_gate_exps.{kind}": rows[:, ::2], f"{layer}.ffn_up_exps.{kind}": rows[:, 1::2]}


def gpt_oss_weight(pieces: list[Tensor], kind: str) -> Tensor:
    """Invert `gpt_oss_pieces`."""
    rows = torch.stack(pieces, dim=2).flatten(1, 2) if len(pieces) > 1 else pieces[0]
    return rows if kind == "bias" else rows.transpose(1, 2).contiguous()


def split_kv_b(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    layer = f"blk.{name.split('.')[2]}"
    heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
    k, v = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return {f"{layer}.attn_k_b.weight": k.transpose(1, 2), f"{layer}.attn_v_b.weight": v}


def add_deepseek_fields(writer: gguf.GGUFWriter, config: Any, is_old: bool) -> None:
    """Write DeepSeek's metadata. is_old: only head sizes, neither V2's gate nor groups."""
    qk_dim, rope_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_rope_head_dim
    if is_old:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(qk_dim)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + rope_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(qk_dim)
        writer.add_value_length_mla(config.v_head_dim)
        if extra := getattr(config, "num_nextn_predict_layers", 0):
            writer.add_nextn_predict_layers(extra)
        if config.n_group:
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
    kinds = gguf.ExpertGatingFuncType
    if config.model_type == "deepseek_v3":
        writer.add_expert_gating_func(kinds.SIGMOID)
    elif not is_old:
        writer.add_expert_gating_func(kinds.SOFTMAX)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    writer.add_rope_dimension_count(rope_dim)
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    add_yarn(writer, config)


def add_yarn(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if rope["rope_type"] != "yarn":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def add_gpt_oss_fields(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    add_yarn(writer, config)
