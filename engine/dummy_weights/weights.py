"""Random weights that are drawn where they are used, which is fast, but CPUs and GPUs draw different numbers."""

from __future__ import annotations

from typing import Any

import torch

from engine.config import EngineConfig
from engine.dummy_weights.settings import DummySettings
from engine.loader.random_weights import SEED, RandomWeights

STD = 0.02


class DummyWeights(RandomWeights):
    """See RandomWeights."""

    def __init__(self, dtype: torch.dtype, device: torch.device, std: float = STD) -> None:
        super().__init__(dtype, device, std)
        self._draw_device, self._draw_dtype = device, dtype
        self._generator = torch.Generator(device=device).manual_seed(SEED)


def is_asked(config: EngineConfig) -> bool:
    """Whether the weights of the model's files are left alone."""
    return config.of(DummySettings).load_format == "dummy"


def dummy_weights(
    config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> tuple[DummyWeights, dict[str, Any]] | None:
    """The weights and what identifies them; None: those of the model's files are asked for."""
    if not is_asked(config):
        return None
    return DummyWeights(dtype, device), {"random": SEED, "std": STD, "drawn_on": device.type}
