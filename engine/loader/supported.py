"""What attention backends and devices cannot do with a model, as far as its config and the names of its weights tell.

Asked before weights are read, which may take minutes.
"""

from __future__ import annotations

import torch

from common.errors import ConfigError, UnsupportedModelError
from engine.models.config import ModelConfig


def check_attention(config: ModelConfig, attention_backend: str) -> None:
    """Raise ConfigError for an attention backend that was asked for and does not know the model's attention."""
    if not config.is_causal and attention_backend != "auto":
        raise ConfigError(f"--attention-backend {attention_backend} knows no attention to later tokens; leave it out")
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
