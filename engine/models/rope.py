"""Rotary embedding as configs describe it; `engine/layers/rotary.py` computes the table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from common.errors import ConfigError, UnsupportedModelError

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
LONG_KINDS = ("longrope", "su")  # two names of one kind


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base and how the frequencies are stretched beyond the trained context."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # factors: None: 1; yarn: None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn
    frequency_factors: tuple[float, ...] = ()  # factors: what files store per frequency instead of a formula
    short_factors: tuple[float, ...] = ()  # factors: instead, where no context exceeds the trained one
    partial: float = 1.0  # how much of each head is rotated, its first numbers

    def rotated(self, head_dim: int) -> int:
        """Numbers of a head that are rotated."""
        return int(head_dim * self.partial)

    def within(self, context_length: int) -> RopeConfig:
        """That of a model which is used for contexts up to this length.

        K in the pool is rotated, so one sequence cannot change from one set of factors to the other.
        """
        if not self.short_factors or context_length > self.original_max_position:
            return self
        return replace(self, frequency_factors=self.short_factors, short_factors=())


def rope_from_hf(raw: Mapping[str, Any], max_position: int) -> RopeConfig:
    values = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in (*ROPE_KINDS, *LONG_KINDS):
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported (known: {', '.join(ROPE_KINDS)})")
    theta = float(values.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    partial = float(raw.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0)
    if kind in LONG_KINDS:
        return _longrope(raw, values, max_position, theta, partial)
    factor, attention_factor = float(values.get("factor") or 1.0), values.get("attention_factor")
    mscale, mscale_all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return RopeConfig(
        theta=theta,
        kind=cast(RopeKind, kind),
        factor=factor,
        low_freq_factor=float(values.get("low_freq_factor") or 1.0),
        high_freq_factor=float(values.get("high_freq_factor") or 4.0),
        original_max_position=int(values.get("original_max_position_embeddings") or max_position),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        truncate=bool(values.get("truncate", True)),
        partial=partial,
    )


def _longrope(
    raw: Mapping[str, Any], values: Mapping[str, Any], max_position: int, theta: float, partial: float
) -> RopeConfig:
    """Factors of each frequency, as transformers defines their scale."""
    original = int(
        values.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings") or max_position
    )
    scale, factor = values.get("attention_factor"), float(values.get("factor") or max_position / original)
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    long, short = (tuple(map(float, values.get(key) or ())) for key in ("long_factor", "short_factor"))
    if not long or len(long) != len(short):
        raise ConfigError(
            "config.json: rope scaling 'longrope' needs a long_factor and a short_factor for each frequency"
        )
    return RopeConfig(
        theta, "factors", original_max_position=original, attention_factor=float(scale), frequency_factors=long,
        short_factors=short, partial=partial,
    )  # fmt: skip


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies queries and keys by for a context `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
