"""Qwen3 with experts: Qwen3's attention, and in the layers that the config names a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import ModelConfig
from engine.models.registry import register
from engine.moe.qwen2_moe import experts_of, qwen2_moe
from engine.qwen import qwen3


def adapt_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    moe = experts_of(config, raw)
    config = qwen3.adapt_config(config, raw)
    if raw.get("use_sliding_window", False):  # of all layers, in this family
        config = replace(config, sliding_window=raw.get("sliding_window"), full_layers=())
    return replace(config, moe=moe)


register("Qwen3MoeForCausalLM", adapt_config)(qwen2_moe)  # blocks differ by the config alone
