"""How a model asks for its weights: by Hugging Face name and shape, from whatever holds them.

A loader implements `WeightSource`; building a model against `ShapeRecorder` lists what the model needs, so that a
loader can compare it with what a checkpoint has before any bytes are read.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class WeightSource(Protocol):
    """Where weights come from."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The weight, in the model's dtype, on its device. Each name is asked for once."""
        ...


class ShapeRecorder:
    """Hands out tensors without storage and remembers what was asked for."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")
