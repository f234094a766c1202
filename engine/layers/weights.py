"""How a model asks for its weights: by Hugging Face name and shape, from whatever holds them.

A loader implements `WeightSource`; building a model against `ShapeRecorder` lists what the model needs, so that a
loader can compare it with what a checkpoint has before any bytes are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

CHOICE_BIAS = "e_score_correction_bias"
"""How names end whose weights are float32 whatever the model computes in: all choices of experts hang on them."""


class Partition(Enum):
    """Which part of a weight (out, in) each rank of a tensor-parallel model holds.

    Models ask for shapes of their own `ModelConfig`, and get a rank's if it is a rank's. With as many pieces as fit
    into the stored dimension, rank r of n holds piece r * pieces // n: so the same KV head goes to several ranks
    where there are fewer heads than ranks.
    """

    NONE = "every rank holds all of it: norms, routers"
    COLUMNS = "outputs are divided, dimension 0 of weight and bias: q, k and v by heads, gate and up"
    ROWS = "inputs are divided, dimension 1; outputs are summed over ranks, so that one rank alone has the bias"
    LAST = "outputs are divided, the last dimension: gate and up of all experts in one weight, and their biases"
    ONCE = "rank 0 alone has it, others zeros: a bias on what is summed"
    VOCAB = "rows of embedding and output projection are divided, dimension 0; the last rank's may end in padding"


Part = tuple[range, ...]
"""Which indices in each dimension of a stored tensor."""


class WeightSource(Protocol):
    """Where weights come from."""

    def take(self, name: str, shape: tuple[int, ...], partition: Partition = Partition.NONE) -> Tensor:
        """The weight, in the model's dtype, on its device. Each name is asked for once.

        shape: of what this rank holds. partition: how that lies in the stored tensor.
        """
        ...


class PartSource(ABC):
    """A source of whole weights that can read parts of them."""

    def take(self, name: str, shape: tuple[int, ...], partition: Partition = Partition.NONE) -> Tensor:
        """See WeightSource."""
        return self.take_part(name, tuple(map(range, shape)))

    @abstractmethod
    def take_part(self, name: str, part: Part) -> Tensor:
        """That part of a weight, as `take` gives the whole."""


class ShapeRecorder:
    """Hands out tensors without storage and remembers what was asked for."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, shape: tuple[int, ...], partition: Partition = Partition.NONE) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")
