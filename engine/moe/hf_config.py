"""Experts from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import ConfigError
from engine.models.hf_config import positive
from engine.moe.config import MoeConfig


def moe_from_hf(raw: Mapping[str, Any], intermediate_size: str) -> MoeConfig:
    """Read the fields that all MoE families have. intermediate_size: the family's name of an expert's."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    count = next((name for name in names if name in raw), names[0])
    moe = MoeConfig(positive(raw, count), positive(raw, "num_experts_per_tok"), positive(raw, intermediate_size))
    if moe.num_experts_per_token > moe.num_experts:
        raise ConfigError(f"config.json: {moe.num_experts_per_token} experts a token of {moe.num_experts}")
    return moe
