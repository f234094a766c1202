"""Root-mean-square norm of few rows on a CPU, through torch's one fused norm, the layer norm.

Formula: y = x / sqrt(mean(x^2) + eps) * weight. The layer norm of a row followed by its negative is exactly that:
such a row's mean is zero and its variance mean(x^2). A residual stream that is kept as both halves needs no more
operations than a plain one. One row of 576: 2.3 us, `functional.rms_norm` 9.4, spelled out in torch 11.6.
"""

from __future__ import annotations

import torch
from torch import Tensor


def signs_like(x: Tensor) -> Tensor:
    """(2, 1): what turns a row into itself and its negative."""
    return torch.tensor([[1.0], [-1.0]], dtype=x.dtype, device=x.device)


def opposed(x: Tensor, signs: Tensor) -> Tensor:
    """(rows, n) -> (rows, 2, n): each row, then its negative."""
    return x.unsqueeze(1) * signs


def add_rms_norm_of_opposed(
    weights: Tensor, signs: Tensor, eps: float, dtype: torch.dtype, pairs: Tensor, x: Tensor | None
) -> Tensor:
    """Add x (rows, n), if given, to the rows of `pairs` (rows, 2, n) in place -> the sum's norm (rows, n), dense.

    weights: (2, n), two equal rows, in the dtype of `pairs`. One function, constants first so that they can be bound:
    a call takes 0.2 us, and a step of SmolLM2 norms 61 times.
    """
    if x is not None:
        pairs.addcmul_(x.unsqueeze(1), signs)
    first = torch.native_layer_norm(pairs, weights.shape, weights, None, eps)[0].select(1, 0)
    return first.contiguous() if dtype == first.dtype else first.to(dtype)
