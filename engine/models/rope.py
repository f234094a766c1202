"""Rotary embedding as configs describe it; `engine/layers/rotary.py` computes the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from common.wings import require_wing

if TYPE_CHECKING:
    from torch import Tensor


class RopeScaling(Protocol):
    """How frequencies are stretched beyond the trained context, as plain data."""

    def within(self, context_length: int) -> RopeScaling:
        """That of a model which is used for contexts up to this length.

        K in the pool is rotated, so one sequence cannot change from one kind of stretching to another.
        """
        ...

    def scaled(self, frequencies: Tensor, theta: float) -> tuple[Tensor, float]:
        """Stretch plain angles per position, and give the factor on cosines and sines. Raises ConfigError."""
        ...


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """theta: the base. partial: how much of each head is rotated, its first numbers."""

    theta: float = 10000.0
    partial: float = 1.0
    scaling: RopeScaling | None = None

    def rotated(self, head_dim: int) -> int:
        """Numbers of a head that are rotated."""
        return int(head_dim * self.partial)

    def within(self, context_length: int) -> RopeConfig:
        """See RopeScaling."""
        return self if self.scaling is None else replace(self, scaling=self.scaling.within(context_length))


def rope_from_hf(raw: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Read config.json. Raises ConfigError, UnsupportedModelError."""
    values = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = values.get("rope_type") or values.get("type") or "default"
    scaling = None
    if kind != "default":
        require_wing("engine.rope_scaling", f"rope scaling {kind!r}")
        from engine.rope_scaling.scaling import scaling_from_hf

        scaling = scaling_from_hf(kind, values, raw, max_position)
    theta = float(values.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    partial = float(raw.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0)
    return RopeConfig(theta, partial, scaling)
