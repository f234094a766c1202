"""The blocks of a decoder: each reads the normed residual, and its output is added to the residual.

A block is plain torch. It neither adds nor norms (`engine/layers/forward.py` does), and it does not know where K and
V are stored: it calls `Step.attend`. A faster form of a block is another op over the same weights, chosen by a
lowering.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.weights import Partition, WeightSource

X = TypeVar("X")
AddNorm = Callable[[Tensor, Tensor | None], X]
"""(residual, pending) -> the RMS norm of their sum. It replaces the residual in place. None: nothing is pending."""
Attend = Callable[[Any, Tensor], Tensor]
"""(attention block, q, k and v) -> the input of its output projection: `AttentionBackend.attend` with metadata."""


@dataclass(slots=True)
class Step:
    """The inputs of one forward pass. token_ids, positions: (num_tokens,)."""

    token_ids: Tensor
    positions: Tensor
    attend: Attend


@dataclass(frozen=True, slots=True)
class LinearRef:
    """A place in a model that holds a linear layer, which can be replaced."""

    owner: Any
    attribute: str

    @property
    def layer(self) -> Linear:
        layer: Linear = getattr(self.owner, self.attribute)
        return layer

    def replace(self, layer: Linear) -> None:
        setattr(self.owner, self.attribute, layer)


class Block(ABC):
    """One part of a decoder layer. norm: (hidden,), the RMS norm before it, with `eps`.

    gpu_ops: name of the module with the GPU ops of a kind of block that is not in the GPU's table, see `BlockOps`
    there.
    """

    gpu_ops = ""

    norm: Tensor
    eps: float

    @abstractmethod
    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x: the normed residual (num_tokens, hidden). Returns the output, which is added to the residual."""

    @property
    def inner(self) -> Block:
        """The block inside the blocks that wrap it."""
        return self

    @abstractmethod
    def linears(self) -> Iterator[LinearRef]:
        """All linear layers that may be quantized or otherwise replaced."""

    @property
    def needs_all_tokens(self) -> bool:
        """Whether it must compute all tokens, also those whose output no later block reads."""
        return False

    def copy(self) -> Self:
        """Return a block over the same weights whose linear layers can be replaced without changing this block."""
        return copy.copy(self)


def take_linear(
    weights: WeightSource, names: Sequence[str], sizes: Sequence[int], in_size: int, bias: bool, partition: Partition
) -> Linear:
    """Take weights, with `sizes` outputs each, and stack them into one linear layer. names: without `.weight`."""
    pairs = list(zip(names, sizes, strict=True))
    parts = [weights.take(f"{name}.weight", (size, in_size), partition) for name, size in pairs]
    biases = [weights.take(f"{name}.bias", (size,), partition) for name, size in pairs] if bias else []
    return Linear(joined(parts), joined(biases) if bias else None, tuple(f"{name}.weight" for name in names))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate rows. Nothing is computed on "meta", where torch's first operation imports modules for 2 s."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].device.type == "meta":
        rows = sum(part.shape[0] for part in parts)
        return torch.empty(rows, *parts[0].shape[1:], dtype=parts[0].dtype, device="meta")
    return torch.cat(list(parts))
