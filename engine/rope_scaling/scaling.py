"""How frequencies are stretched: transformers' definitions of the kinds `linear`, `llama3`, `yarn` and `longrope`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from common.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["linear", "llama3", "yarn", "factors"]
KINDS = ("default", "linear", "llama3", "yarn", "longrope")
LONG_KINDS = ("longrope", "su")  # two names of one kind


@dataclass(frozen=True, slots=True)
class Scaling:
    """See `RopeScaling` of `engine/models/config.py`."""

    kind: Kind
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

    def within(self, context_length: int) -> Scaling:
        """See RopeScaling."""
        if not self.short_factors or context_length > self.original_max_position:
            return self
        return replace(self, frequency_factors=self.short_factors, short_factors=())

    def scaled(self, frequencies: Tensor, theta: float) -> tuple[Tensor, float]:
        """See RopeScaling."""
        if self.kind == "linear":
            return frequencies / self.factor, 1.0
        if self.kind == "factors":
            factors = frequencies.new_tensor(self.frequency_factors)
            if factors.shape != frequencies.shape:
                raise ConfigError(f"rotary embedding: {len(factors)} factors of {len(frequencies)} frequencies")
            return frequencies / factors, self.attention_factor or 1.0
        if self.kind == "llama3":
            return self._llama3(frequencies), 1.0
        scale = yarn_mscale(self.factor) if self.attention_factor is None else self.attention_factor
        return self._yarn(frequencies, theta), scale

    def _llama3(self, plain: Tensor) -> Tensor:
        """Keep short waves, divide long ones by `factor`, blend in between."""
        wave_len = 2 * math.pi / plain
        blend = (self.original_max_position / wave_len - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * plain / self.factor + blend * plain

    def _yarn(self, plain: Tensor, theta: float) -> Tensor:
        """Keep dimensions that turn more than `beta_fast` times, divide those below `beta_slow` by `factor`."""
        head_dim = 2 * len(plain)

        def dimension_of(num_turns: float) -> float:
            return head_dim * math.log(self.original_max_position / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        ramp = ((plain.new_tensor(range(len(plain))) - low) / (high - low)).clamp(0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)


def scaling_from_hf(kind: str, values: Mapping[str, Any], raw: Mapping[str, Any], max_position: int) -> Scaling:
    """values: the fields of config.json's rotary embedding. raw: all of the file. Raises UnsupportedModelError."""
    if kind not in (*KINDS, *LONG_KINDS):
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported (known: {', '.join(KINDS)})")
    if kind in LONG_KINDS:
        return _longrope(raw, values, max_position)
    factor, attention_factor = float(values.get("factor") or 1.0), values.get("attention_factor")
    mscale, mscale_all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return Scaling(
        kind=cast(Kind, kind),
        factor=factor,
        low_freq_factor=float(values.get("low_freq_factor") or 1.0),
        high_freq_factor=float(values.get("high_freq_factor") or 4.0),
        original_max_position=int(values.get("original_max_position_embeddings") or max_position),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        truncate=bool(values.get("truncate", True)),
    )


def _longrope(raw: Mapping[str, Any], values: Mapping[str, Any], max_position: int) -> Scaling:
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
    return Scaling(
        "factors", original_max_position=original, attention_factor=float(scale), frequency_factors=long,
        short_factors=short,
    )  # fmt: skip


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies queries and keys by for a context `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
