"""What a model's config says of the experts of one layer."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config import ModelConfig


def has_experts(config: ModelConfig, layer: int) -> bool:
    return config.moe is not None and layer not in config.moe.dense_layers


def of_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """The config with this layer's placement of experts."""
    if config.moe is None or not config.expert_slots:
        return config
    return replace(config, moe=replace(config.moe, slots=config.expert_slots[layer]))
