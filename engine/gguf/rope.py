"""Rotary embedding from GGUF metadata and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from common.errors import UnsupportedModelError
from engine.gguf.names import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT
from engine.gguf.weights import GgufFile
from engine.models.config import RopeConfig
from engine.rope_scaling.scaling import Kind, Scaling


def rope_from_gguf(metadata: Mapping[str, Any], arch: str) -> RopeConfig:
    """Read the rotary embedding's config from metadata. Raises UnsupportedModelError."""
    scaling = f"{arch}.rope.scaling"
    kind, theta = metadata.get(f"{scaling}.type", "none"), float(metadata.get(f"{arch}.rope.freq_base", 10000.0))
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"rope scaling {kind!r} in a GGUF file is not supported")
    if kind == "none":
        return RopeConfig(theta)
    found = Scaling(
        cast(Kind, kind),
        factor=float(metadata.get(f"{scaling}.factor", 1.0)),
        original_max_position=_trained_context(metadata, arch),
        beta_fast=float(metadata.get(f"{scaling}.yarn_beta_fast") or 32.0),
        beta_slow=float(metadata.get(f"{scaling}.yarn_beta_slow") or 1.0),
        truncate=arch != "gpt-oss",  # not in files
    )
    if kind == "yarn" and f"{scaling}.yarn_log_multiplier" in metadata:
        # The multiplier only scales scores, see `fields.py`; cosines and sines are not scaled.
        found = replace(found, attention_factor=1.0)
    return RopeConfig(theta, scaling=found)


def with_factors(rope: RopeConfig, file: GgufFile, arch: str) -> RopeConfig:
    """Add the frequency factors that the file stores as tensors, if any."""
    original = _trained_context(file.metadata, arch)
    if ROPE_LONG in file.tensors and ROPE_SHORT in file.tensors:
        factors, short = (tuple(file.read(name).tolist()) for name in (ROPE_LONG, ROPE_SHORT))
        scale = file.metadata.get(f"{arch}.rope.scaling.attn_factor")
        return replace(rope, scaling=Scaling(
            "factors", original_max_position=original, attention_factor=scale, frequency_factors=factors,
            short_factors=short,
        ))  # fmt: skip
    if ROPE_FACTORS in file.tensors:
        factors = tuple(file.read(ROPE_FACTORS).tolist())
        return replace(rope, scaling=Scaling("factors", original_max_position=original, frequency_factors=factors))
    return rope


def _trained_context(metadata: Mapping[str, Any], arch: str) -> int:
    return int(metadata.get(f"{arch}.rope.scaling.original_context_length") or metadata[f"{arch}.context_length"])
