"""Root-mean-square norm: y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., n), weight (n,) -> (..., n)."""
    return functional.rms_norm(x, weight.shape, weight, eps)
