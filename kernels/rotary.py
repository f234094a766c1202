"""Rotary embedding of heads: y = x * cos + (second half, first half) * sin, sin carrying the rotation's sign."""

from __future__ import annotations

from torch import Tensor

from kernels import cpu_rows


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In place: x (num_tokens, num_heads, head_dim), cos and sin (num_tokens, 1, head_dim). Rounded once."""
    if cpu_rows.rotate(x, cos, sin):
        return x
    wide = x.to(cos.dtype)
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    wide.mul_(cos).addcmul_(swapped, sin)
    return x if wide is x else x.copy_(wide)
