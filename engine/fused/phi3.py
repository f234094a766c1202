"""Phi-3, Phi-3.5 and Phi-4: q, k and v in one tensor, gate and up in another; part of each head may be rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import ModelConfig
from engine.models.llama import llama
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


register("Phi3ForCausalLM", adapt_config, fused=FUSED)(llama)
