"""Tiny models for GPU kernels, written with safetensors and without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models.families import family_of
from engine.models.hf_config import config_from_hf
from kernels.gpu.few_rows.gemm_configs import GemvConfig, TileConfig
from kernels.gpu.tuning import Rule, Table

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 97, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "eos_token_id": 3, "hidden_act": "silu", "attention_bias": False,
    "torch_dtype": "float32",
}  # fmt: skip


def save_tiny_model(
    folder: Path, head_dim: int = 16, hidden: int = 64, inner: int = 96, num_experts: int = 0, num_choices: int = 3
) -> Path:
    """Save random weights with well separated logits. num_experts: 0: plain MLPs. num_choices: experts per token."""
    generator = torch.Generator().manual_seed(7)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    tensors = {"model.embed_tokens.weight": weight(97, hidden) * 8, "model.norm.weight": torch.ones(hidden)}
    for index in range(2):
        prefix = f"model.layers.{index}."
        for name, shape in {
            "self_attn.q_proj": (4 * head_dim, hidden), "self_attn.k_proj": (2 * head_dim, hidden),
            "self_attn.v_proj": (2 * head_dim, hidden), "self_attn.o_proj": (hidden, 4 * head_dim),
            **({"mlp.gate": (num_experts, hidden)} if num_experts else {}),
            **{
                f"{mlp}.{name}": shape
                for mlp in ([f"mlp.experts.{expert}" for expert in range(num_experts)] or ["mlp"])
                for name, shape in {
                    "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)
                }.items()
            },
        }.items():  # fmt: skip
            tensors[f"{prefix}{name}.weight"] = weight(*shape)
        for name, size in {
            "input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.q_norm": head_dim,
            "self_attn.k_norm": head_dim,
        }.items():  # fmt: skip
            tensors[f"{prefix}{name}.weight"] = 1 + 0.1 * torch.randn(size, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    config = {**CONFIG, "head_dim": head_dim, "hidden_size": hidden, "intermediate_size": inner}
    if num_experts:
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
        config |= {"num_experts": num_experts, "num_experts_per_tok": num_choices, "moe_intermediate_size": inner}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_family(folder: Path, changes: dict[str, Any]) -> Path:
    """Save random weights of a family's tensors, with well separated logits. changes: of CONFIG."""
    raw = {**CONFIG, **changes}
    family = family_of(raw["architectures"][0])
    _, shapes = family.skeleton(family.adapt_config(config_from_hf(raw), raw))
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        is_norm, scale = name.endswith("norm.weight"), 8.0 if "embed" in name else 1.0
        tensors[name] = 1 + 0.1 * drawn if is_norm else scale * drawn / shape[-1] ** 0.5
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def use_small_tiles(patch: pytest.MonkeyPatch, max_pairs: int) -> None:
    """Use settings that fit tiny experts and are fast to interpret. max_pairs: more pairs are sorted."""
    small = Table(Rule(GemvConfig(16, 32, num_warps=1, num_stages=1)))
    tiles = Table(Rule(TileConfig(64, 32, num_stages=1, block_m=16)))
    for name, value in (
        ("MAX_PAIRS", Table(Rule((max_pairs, 1 / 4)))), ("GATE_UP_PAIRS", small), ("DOWN_PAIRS", small),
        ("GATE_UP_ROW", small), ("DOWN_ROW", small), ("GROUPED_GATE_UP", tiles), ("GROUPED_DOWN", tiles),
    ):  # fmt: skip
        patch.setattr(f"engine.moe.gpu_experts.{name}", value)
