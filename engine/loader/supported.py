"""What settings and devices cannot do with a model, as far as its config and the names of its weights tell.

Asked before weights are read, which may take minutes.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from common.errors import ConfigError, UnsupportedModelError
from engine.config import EngineConfig
from engine.layers.linear import Linear, LinearLayer
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.moe.moe import Moe

EXPERTS = "on a GPU a layer's experts must all be quantized, shared ones too, or none: use --quant-mode none"


def check_settings(config: ModelConfig, engine_config: EngineConfig) -> None:
    """Raise ConfigError for a setting that says nothing about such a model."""
    if config.latent is None and engine_config.mla != EngineConfig.mla:
        raise ConfigError(f"--mla {engine_config.mla}: {config.architecture} has no latent attention; leave it out")


def check_attention(config: ModelConfig, attention_backend: str) -> None:
    """Raise ConfigError for an attention backend that was asked for and does not know the model's attention."""
    if config.windows and attention_backend not in ("auto", "triton"):
        raise ConfigError(f"--attention-backend {attention_backend} knows no sliding windows; use triton")
    if config.latent is not None and attention_backend == "cudnn":
        raise ConfigError("--attention-backend cudnn does not take latent attention; use triton")


def check_kernels(config: ModelConfig, device: torch.device) -> None:
    """Raise UnsupportedModelError for blocks that the device has no kernels for."""
    if device.type != "cuda":
        return
    latent = config.latent
    if latent is None and config.head_dim & (config.head_dim - 1):
        raise UnsupportedModelError(
            f"heads of {config.head_dim} numbers, which is no power of two, have no GPU kernels: use --device cpu"
        )
    if latent is not None and latent.form != "absorbed":
        raise UnsupportedModelError(f"--mla {latent.form} has no GPU kernels: use absorbed, or --device cpu")


def check_packed_experts(skeleton: Model, device: torch.device, packed: Container[str]) -> None:
    """Raise UnsupportedModelError for a layer's experts of which only some stay quantized: `packed`."""
    if device.type != "cuda":
        return
    for block in skeleton.blocks:
        if isinstance(block, Moe):
            experts = [*block.experts.values(), *([] if block.shared is None else [block.shared])]
            for layers in zip(*((expert.gate_up, expert.down) for expert in experts), strict=True):
                if len({_is_packed(layer, packed) for layer in layers}) > 1:
                    raise UnsupportedModelError(EXPERTS)


def _is_packed(layer: LinearLayer, packed: Container[str]) -> bool:
    return isinstance(layer, Linear) and all(name in packed for name in layer.names)
