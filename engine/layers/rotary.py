"""Rotary position embedding: a table of cosines and sines, computed once per model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.config import RopeConfig


class Rotation(NamedTuple):
    """Rows of a rotary table for a step's tokens: (num_tokens, 1, head_dim) each, sines with the rotation's sign."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, table: Tensor, positions: Tensor) -> Rotation:
        rows = table[positions]
        return cls(rows[:, :1], rows[:, 1:])


def rotary_table(
    rope: RopeConfig, head_dim: int, num_positions: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a table [num_positions, 2, head_dim]: cosines, then sines with the sign of the rotation folded in.

    Rotation of a head x = (a, b), halves of head_dim: (a cos - b sin, b cos + a sin), which with this table is
    x * table[0] + (b, a) * table[1]. With partial rotation the last pairs are not rotated, see `rotary_order`.
    """
    rotated = rope.rotated(head_dim)
    frequencies, scale = rotary_frequencies(rope, rotated)
    if device.type == "meta":  # of a skeleton, which only lists the weights that the model takes
        return torch.empty(num_positions, 2, head_dim, dtype=dtype, device=device)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    rest = (head_dim - rotated) // 2
    cos, sin = functional.pad(cos, (0, rest), value=1.0), functional.pad(sin, (0, rest))
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
    return table.to(device=device, dtype=dtype)


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the angles per position [head_dim / 2] in float32, and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    return (plain, 1.0) if rope.scaling is None else rope.scaling.scaled(plain, rope.theta)
