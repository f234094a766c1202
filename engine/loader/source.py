"""Opens model files: finds the config that they describe and the source of their weights. Reads no weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.model_files import ModelFiles
from common.wings import call_wing, require_wing
from engine.config import EngineConfig
from engine.layers.weights import WeightSource
from engine.loader.checkpoint import Check, Shape, check_weights
from engine.loader.random_weights import DRY_RUN_CONFIG, DRY_RUN_STD, SEED, RandomWeights
from engine.loader.safetensors import SafetensorsWeights
from engine.models.config import ModelConfig
from engine.models.families import ModelFamily, family_of
from engine.models.hf_config import architecture_of, config_from_hf, read_hf_config
from engine.models.model import Model
from kvstore.layout import Shard

if TYPE_CHECKING:
    from engine.fused.stored_rows import StoredRows
    from engine.loader.conversion import Conversion
    from engine.quantization.checkpoint import QuantizedCheckpoint

WING = "engine.quantization"


@dataclass(frozen=True, slots=True)
class Source:
    """Contents of the model files: the config, the weights, and their part of the fingerprint."""

    config: ModelConfig
    family: ModelFamily
    weights: WeightSource
    check: Check | None  # compares them with the needed ones; None: the source can make any weight
    identity: dict[str, Any]
    files: list[Path]

    def checked_skeleton(self) -> tuple[Model, dict[str, Shape]]:
        """Return the model without storage, and the shapes of the weights that it needs.

        Raises ConfigError if the files do not have these weights.
        """
        skeleton, needed = self.family.skeleton(self.config)
        tied, unused = self.config.tie_word_embeddings, self.config.unused_weights
        if self.check is not None:
            self.check(needed, tied=tied, unused=unused)
        return skeleton, needed

    def conversion(
        self, engine_config: EngineConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> Conversion | None:
        """Choose how linear layers are converted; None: they stay plain.

        Raises ConfigError for a mode without a kernel or weights.
        """
        if engine_config.quant_mode not in ("auto", "none"):
            require_wing(WING, f"--quant-mode {engine_config.quant_mode}")
        asked = self.weights, engine_config, dtype, device
        chosen: Conversion | None = call_wing("engine.gguf.choose:block_conversion", *asked)
        if chosen is None:
            chosen = call_wing("engine.quantization.conversion:choose_conversion", *asked, shard)
        return chosen


def open_source(files: ModelFiles, engine_config: EngineConfig, dtype: torch.dtype, device: torch.device) -> Source:
    """Read the config and the names and shapes of weights. Raises ConfigError and UnsupportedModelError."""
    opened = call_wing("engine.transformers_models.source:open_transformers", files, engine_config, dtype, device)
    if opened is not None:
        return Source(*opened)
    if files.kind == "dry-run":
        family = family_of(DRY_RUN_CONFIG.architecture)
        random = RandomWeights(dtype, device, DRY_RUN_STD)
        return Source(DRY_RUN_CONFIG, family, random, None, {"random": SEED, "std": DRY_RUN_STD}, [])
    if files.kind == "gguf":
        from engine.gguf.choose import open_gguf

        return Source(*open_gguf(files.path, engine_config, dtype, device))
    raw = read_hf_config(files.path)
    family = family_of(architecture_of(raw))
    if family.text_config is not None:
        raw = family.text_config(raw)
    config = family.adapt_config(config_from_hf(raw), raw)
    if config.latent is not None:
        config = call_wing("engine.mla.deepseek:with_asked_form", config, engine_config)
    quantized = quantized_checkpoint(raw)
    dummy = call_wing("engine.dummy_weights.weights:dummy_weights", engine_config, dtype, device)
    if dummy is not None:
        weights, identity = dummy
        if quantized is not None:
            weights = quantized.random(weights, family.skeleton(config)[1], dtype, device)
        return Source(config, family, weights, None, identity, [])
    config = replace(config, rope=config.rope.within(config.context_length(engine_config.max_model_len)))
    tensors = SafetensorsWeights(files.path, dtype, device)
    if tensors.prefix:  # no head: an embedding model does not need one
        config = replace(config, tie_word_embeddings=True)
    needed = family.skeleton(config)[1]
    rows: Mapping[str, StoredRows] = {}
    if family.fused or config.rope.partial != 1:
        require_wing("engine.fused", "a checkpoint with fused weights or partial rotary embedding")
        from engine.fused.divided_weights import divided

        tensors, rows = divided(tensors, needed, family.fused, config)
    if quantized is None:
        check = partial(check_weights, found=tensors.shapes)
        return Source(config, family, tensors, check, {}, tensors.files)
    if quantized.label and engine_config.quant_mode == "auto" and dtype == torch.bfloat16:
        config = replace(config, linear_bits=quantized.held_bits)
    weights, compare = quantized.open(tensors, rows, needed)
    return Source(config, family, weights, compare, {}, tensors.files)


def check_settings(config: ModelConfig, engine_config: EngineConfig) -> None:
    """Raise ConfigError for a setting that does not apply to such a model."""
    call_wing("engine.mla.settings:check_settings", config, engine_config)


def quantized_checkpoint(raw: Mapping[str, Any]) -> QuantizedCheckpoint | None:
    """Return the quantized checkpoint that config.json describes, if any. Raises ConfigError if it cannot be read."""
    is_mlx = isinstance(raw.get("quantization"), Mapping)  # refused by the wing
    if not (raw.get("quantization_config") or raw.get("compression_config") or is_mlx):
        return None
    require_wing(WING, "a quantized checkpoint")
    from engine.quantization.checkpoint import QuantizedCheckpoint

    return QuantizedCheckpoint(raw)
