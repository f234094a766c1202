"""Rotary embedding of heads: y = x * cos + (second half, first half) * sin, sin carrying the rotation's sign."""

from __future__ import annotations

from torch import Tensor


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In place: x (num_tokens, num_heads, head_dim), cos and sin (num_tokens, 1, head_dim)."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return x.mul_(cos).addcmul_(swapped, sin)
