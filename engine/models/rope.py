"""Rotary embedding as configs describe it; `engine/layers/rotary.py` computes the table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from common.errors import UnsupportedModelError

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


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
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn
    frequency_factors: tuple[float, ...] = ()  # factors: what GGUF files store per frequency instead of a formula


def rope_from_hf(raw: Mapping[str, Any], max_position: int) -> RopeConfig:
    values = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported (known: {', '.join(ROPE_KINDS)})")
    if float(raw.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError("partial rotary embedding is not supported")
    factor, attention_factor = float(values.get("factor") or 1.0), values.get("attention_factor")
    mscale, mscale_all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return RopeConfig(
        theta=float(values.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        kind=cast(RopeKind, kind),
        factor=factor,
        low_freq_factor=float(values.get("low_freq_factor") or 1.0),
        high_freq_factor=float(values.get("high_freq_factor") or 4.0),
        original_max_position=int(values.get("original_max_position_embeddings") or max_position),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        truncate=bool(values.get("truncate", True)),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies queries and keys by for a context `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_from_gguf(metadata: Mapping[str, Any], arch: str) -> RopeConfig:
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"rope scaling {kind!r} in a GGUF file is not supported")
    return RopeConfig(
        theta=float(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        kind="default" if kind == "none" else cast(RopeKind, kind),
        factor=float(metadata.get(f"{arch}.rope.scaling.factor", 1.0)),
        original_max_position=int(
            metadata.get(f"{arch}.rope.scaling.original_context_length") or metadata[f"{arch}.context_length"]
        ),
    )
