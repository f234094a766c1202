"""What travels between blocks on a GPU: an output until it is added to the residual, and the fold that adds it.

Beside these, the kernel that norms may quantize what it writes (`engine/quantization/gpu_ops.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from kernels.gpu.elementwise.rms_norm import add_rms_norm, rms_norm

X = TypeVar("X")


class PendingOutput(ABC):
    """An output in a form of its own."""

    __slots__ = ()

    @abstractmethod
    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add it to the residual, in place. Returns the RMS norm of the sum, with `weight`."""

    @abstractmethod
    def plain(self, eps: float) -> Tensor:
        """What is added, (num_tokens, hidden)."""

    @abstractmethod
    def rows(self, index: Tensor) -> PendingOutput:
        """The output of those tokens, int64 (n,)."""


Pending = Tensor | PendingOutput
Fold = Callable[[Tensor, Pending | None], X]
"""(residual, pending) -> a block's input. The residual becomes their sum in place."""


@dataclass(frozen=True, slots=True)
class AddNorm:
    """The fold whose result is the RMS norm, in one kernel."""

    weight: Tensor
    eps: float

    def __call__(self, residual: Tensor, pending: Pending | None) -> Tensor:
        if pending is None:
            return rms_norm(residual, self.weight, self.eps)
        if isinstance(pending, Tensor):
            return add_rms_norm(pending, residual, self.weight, self.eps)
        return pending.add_norm(residual, self.weight, self.eps)


def rows_of(pending: Pending | None, index: Tensor) -> Pending | None:
    """Select tokens of an output."""
    if isinstance(pending, Tensor):
        return pending[index]
    return pending if pending is None else pending.rows(index)


def plain_of(pending: Pending | None, eps: float) -> Tensor | None:
    """What is added, (num_tokens, hidden)."""
    return pending.plain(eps) if isinstance(pending, PendingOutput) else pending
