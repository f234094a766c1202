"""Rotary position embedding: a table of cosines and sines, computed once per model.

Frequencies follow transformers' definitions of the scaling kinds `linear`, `llama3`, `yarn` and `longrope`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from common.errors import ConfigError
from engine.models.rope import RopeConfig, yarn_mscale


class Rotation(NamedTuple):
    """Rows of a rotary table for a step's tokens: (num_tokens, 1, head_dim) each, sines with their sign."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, table: Tensor, positions: Tensor) -> Rotation:
        rows = table[positions]
        return cls(rows[:, :1], rows[:, 1:])


def rotary_table(
    rope: RopeConfig, head_dim: int, num_positions: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[num_positions, 2, head_dim]: cosines, then sines with the sign of the rotation folded in.

    Rotation of a head x = (a, b), halves of head_dim: (a cos - b sin, b cos + a sin), which with this table is
    x * table[0] + (b, a) * table[1]. Pairs that are not rotated are the last ones, see `rotary_order`.
    """
    rotated = rope.rotated(head_dim)
    frequencies, scale = rotary_frequencies(rope, rotated)
    if device.type == "meta":  # of a model that only says which weights it takes
        return torch.empty(num_positions, 2, head_dim, dtype=dtype, device=device)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    rest = (head_dim - rotated) // 2
    cos, sin = functional.pad(cos, (0, rest), value=1.0), functional.pad(sin, (0, rest))
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
    return table.to(device=device, dtype=dtype)


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angles per position [head_dim / 2] in float32, and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "factors":
        factors = torch.tensor(rope.frequency_factors)
        if factors.shape != plain.shape:
            raise ConfigError(f"rotary embedding: {len(factors)} factors of {len(plain)} frequencies")
        return plain / factors, rope.attention_factor or 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        scale = yarn_mscale(rope.factor) if rope.attention_factor is None else rope.attention_factor
        return _yarn(plain, rope, head_dim), scale
    return plain, 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Keep short waves, divide long ones by `factor`, blend in between."""
    wave_len = 2 * math.pi / plain
    blend = (rope.original_max_position / wave_len - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Keep dimensions that turn more than `beta_fast` times, divide those below `beta_slow` by `factor`."""

    def dimension_of(num_turns: float) -> float:
        return (
            head_dim * math.log(rope.original_max_position / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
