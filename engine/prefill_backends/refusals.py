"""What a backend that was asked for does not know of a model's attention."""

from __future__ import annotations

from common.errors import ConfigError
from engine.models.config import ModelConfig


def check_attention(config: ModelConfig, attention_backend: str) -> None:
    """Raise ConfigError for an attention backend that was asked for and does not know the model's attention."""
    if not config.is_causal and attention_backend != "auto":
        raise ConfigError(f"--attention-backend {attention_backend} knows no attention to later tokens; leave it out")
    if config.windows and attention_backend not in ("auto", "triton"):
        raise ConfigError(f"--attention-backend {attention_backend} knows no sliding windows; use triton")
    if config.latent is not None and attention_backend == "cudnn":
        raise ConfigError("--attention-backend cudnn does not take latent attention; use triton")
