"""The interface through which a model takes its weights, by Hugging Face name and shape.

A loader implements `WeightSource`. Building a model with a `ShapeRecorder` lists the weights that it needs, so that a
loader can compare them with a checkpoint's before it reads any bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

CHOICE_BIAS = "e_score_correction_bias"
"""Suffix of weights that stay float32 in models of any dtype, because the choice of experts depends on them."""


class Partition(Enum):
    """Which part of a weight (out, in) each rank of a tensor-parallel model holds.

    Models ask for the shapes of their `ModelConfig`, which is the rank's on a rank. With as many pieces of that size
    as the stored dimension has, rank r of n holds piece r * pieces // n: so several ranks hold the same KV head if
    there are fewer heads than ranks.
    """

    NONE = "every rank holds all of it: norms, routers"
    COLUMNS = "outputs are divided, dimension 0 of weight and bias: q, k and v by heads, gate and up"
    ROWS = "inputs are divided, dimension 1; outputs are summed over ranks, so that one rank alone has the bias"
    LAST = "outputs are divided, the last dimension: gate and up of all experts in one weight, and their biases"
    ONCE = "rank 0 alone has it, others zeros: a bias on what is summed"
    VOCAB = "rows of embedding and output projection are divided, dimension 0; the last rank's may end in padding"


Part = tuple[range, ...]
"""The range of indices in each dimension of a stored tensor."""


class WeightSource(Protocol):
    """A source of a model's weights."""

    def take(self, name: str, shape: tuple[int, ...], partition: Partition = Partition.NONE) -> Tensor:
        """Return the weight in the model's dtype, on its device. Each name is asked for once.

        shape: of this rank's part. partition: where that part is in the stored tensor.
        """
        ...


class PartSource(ABC):
    """A source of whole weights that can read parts of them."""

    def take(self, name: str, shape: tuple[int, ...], partition: Partition = Partition.NONE) -> Tensor:
        """See WeightSource."""
        return self.take_part(name, tuple(map(range, shape)))

    @abstractmethod
    def take_part(self, name: str, part: Part) -> Tensor:
        """Return a part of a weight, otherwise like `take`."""


class ShapeRecorder:
    """Returns tensors without storage and records their names and shapes."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, shape: tuple[int, ...], partition: Partition = Partition.NONE) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")
