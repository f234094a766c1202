"""Rotary embedding as GGUF metadata and tensors describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from common.errors import UnsupportedModelError
from engine.gguf.names import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT
from engine.gguf.weights import GgufFile
from engine.models.rope import RopeConfig, RopeKind


def rope_from_gguf(metadata: Mapping[str, Any], arch: str) -> RopeConfig:
    """As the metadata tell. Raises UnsupportedModelError."""
    scaling = f"{arch}.rope.scaling"
    kind = metadata.get(f"{scaling}.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"rope scaling {kind!r} in a GGUF file is not supported")
    rope = RopeConfig(
        theta=float(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        kind="default" if kind == "none" else cast(RopeKind, kind),
        factor=float(metadata.get(f"{scaling}.factor", 1.0)),
        original_max_position=int(
            metadata.get(f"{scaling}.original_context_length") or metadata[f"{arch}.context_length"]
        ),
        beta_fast=float(metadata.get(f"{scaling}.yarn_beta_fast") or 32.0),
        beta_slow=float(metadata.get(f"{scaling}.yarn_beta_slow") or 1.0),
        truncate=arch != "gpt-oss",  # files do not tell
    )
    if kind == "yarn" and f"{scaling}.yarn_log_multiplier" in metadata:
        # Its only meaning is a scale of scores, see `fields.py`; cosines and sines then have none.
        return replace(rope, attention_factor=1.0)
    return rope


def with_factors(rope: RopeConfig, file: GgufFile, arch: str) -> RopeConfig:
    """With the factors of each frequency that the file has as tensors, if it has any."""
    if ROPE_FACTORS in file.tensors:
        rope = replace(rope, kind="factors", frequency_factors=tuple(file.read(ROPE_FACTORS).tolist()))
    if ROPE_LONG in file.tensors and ROPE_SHORT in file.tensors:
        return replace(
            rope,
            kind="factors",
            frequency_factors=tuple(file.read(ROPE_LONG).tolist()),
            short_factors=tuple(file.read(ROPE_SHORT).tolist()),
            attention_factor=file.metadata.get(f"{arch}.rope.scaling.attn_factor"),
        )
    return rope
