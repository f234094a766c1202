"""What travels between blocks on a GPU: an output until it is added to the residual, and the fold that adds it.

Beside these, the kernel that norms may quantize what it writes (`engine/quantization/gpu_ops.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from kernels.gpu.elementwise.post_norm import post_norm_add_norm
from kernels.gpu.elementwise.rms_norm import add_rms_norm, add_rms_norm_of_partials, rms_norm

X = TypeVar("X")


@dataclass(frozen=True, slots=True)
class Partials:
    """An output as parts that have to be added up, (num_parts, num_tokens, hidden)."""

    values: Tensor


@dataclass(frozen=True, slots=True)
class Unnormed:
    """An output (num_tokens, hidden) whose RMS norm, with `weight`, is added."""

    values: Tensor
    weight: Tensor


Pending = Tensor | Partials | Unnormed
Fold = Callable[[Tensor, Pending | None], X]
"""(residual, pending) -> a block's input. The residual becomes their sum in place."""


@dataclass(frozen=True, slots=True)
class AddNorm:
    """The fold whose result is the RMS norm, in one kernel."""

    weight: Tensor
    eps: float

    def __call__(self, residual: Tensor, pending: Pending | None) -> Tensor:
        match pending:
            case Tensor():
                return add_rms_norm(pending, residual, self.weight, self.eps)
            case Partials():
                return add_rms_norm_of_partials(pending.values, residual, self.weight, self.eps)
            case Unnormed():
                return post_norm_add_norm(pending.values, pending.weight, residual, self.weight, self.eps)
            case None:
                return rms_norm(residual, self.weight, self.eps)


def plain_of(pending: Pending | None, eps: float) -> Tensor | None:
    """What is added, (num_tokens, hidden)."""
    match pending:
        case Partials():
            return pending.values.sum(0)
        case Unnormed():
            return rms_norm(pending.values, pending.weight, eps)
        case _:
            return pending
