"""Rotary embedding of heads: y = x * cos + (second half, first half) * sin, sin carrying the rotation's sign."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (num_tokens, num_heads, head_dim), cos and sin (num_tokens, 1, head_dim) -> like x."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)
