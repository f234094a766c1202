"""Root-mean-square norm of few rows on a CPU, through torch's one fused norm, the layer norm.

Formula: y = x / sqrt(mean(x^2) + eps) * weight. The layer norm of a row followed by its negative is exactly that:
such a row's mean is zero and its variance mean(x^2). A residual stream that is kept as both halves needs no more
operations than a plain one. One row of 576: 2.3 us, `functional.rms_norm` 9.4, spelled out in torch 11.6.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def signs_like(x: Tensor) -> Tensor:
    """(2, 1): what turns a row into itself and its negative."""
    return torch.tensor([[1.0], [-1.0]], dtype=x.dtype, device=x.device)


def opposed(x: Tensor, signs: Tensor) -> Tensor:
    """(rows, n) -> (rows, 2, n): each row, then its negative."""
    return x.unsqueeze(1) * signs


def add_rms_norm_of_opposed(
    weight: Tensor, eps: float, dtype: torch.dtype
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Make the function that adds x (rows, n), if given, to `pairs` (rows, 2, n) float32 in place, and norms the sum.

    weight: (n,). Its result (rows, n) is dense, of `dtype`. All in one call: among GEMMs whose weights fill the
    caches, a call of a Python function takes about 0.5 us, and a step of SmolLM2 norms 61 times.
    """
    weights = torch.stack([weight, weight]).float()
    signs, shape = signs_like(weights), weights.shape

    def add_norm(pairs: Tensor, x: Tensor | None) -> Tensor:
        if x is not None:
            pairs.addcmul_(x.unsqueeze(1), signs)
        first = torch.native_layer_norm(pairs, shape, weights, None, eps)[0].select(1, 0)
        return first.contiguous() if dtype == first.dtype else first.to(dtype)

    return add_norm
