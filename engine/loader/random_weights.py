"""Random weights, and the config of the tiny `--dry-run` model that uses them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.weights import CHOICE_BIAS, Partition
from engine.loader.checkpoint import Shape
from engine.models.config import ModelConfig, RopeConfig

SEED = 20240

# Byte tokens 0 to 255, then begin and end of sequence and the two role markers of the byte tokenizer.
DRY_RUN_CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=320,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=2048,
    eos_token_ids=(257,),
)
# With 0.02 the residual is little more than the embedding, and greedy output repeats one token.
DRY_RUN_STD = 0.3


class RandomWeights:
    """Normally distributed weights with standard deviation `std`; norms are 1, biases 0.

    Sampled on the CPU in float32, so they are the same everywhere, up to rounding to `dtype`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, std: float) -> None:
        self._dtype, self._device, self._std = dtype, device, std
        self._draw_dtype, self._draw_device = torch.float32, torch.device("cpu")
        self._generator = torch.Generator().manual_seed(SEED)

    def take(self, name: str, shape: Shape, partition: Partition = Partition.NONE) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        weight = torch.empty(shape, dtype=self._draw_dtype, device=self._draw_device)
        weight.normal_(0.0, self._std, generator=self._generator)
        return weight.to(device=self._device, dtype=torch.float32 if name.endswith(CHOICE_BIAS) else self._dtype)
