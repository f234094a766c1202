"""Opens GGUF files, and chooses which weights a CPU computes in blocks: those of files, MXFP4 experts, plain ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.dummy_weights.weights import DummyWeights, dummy_weights
from engine.gguf.config import adapted_config
from engine.gguf.fields import family_of_gguf, gguf_name
from engine.gguf.mxfp4 import CheckpointBlocks, GgufMxfp4Weights, weights_of
from engine.gguf.packed import PackedConversion
from engine.gguf.q8_0 import BlockLinears
from engine.gguf.weights import GgufFile, GgufWeights
from engine.layers.weights import WeightSource
from engine.loader.checkpoint import Check, check_weights
from engine.loader.conversion import Conversion
from engine.loader.safetensors import SafetensorsWeights
from engine.models.config import ModelConfig
from engine.models.families import ModelFamily
from engine.quantization.conversion import QuantizedConversion
from engine.quantization.mxfp4 import Mxfp4Source
from kernels.gguf.library import library


def open_gguf(
    path: Path, engine_config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> tuple[ModelConfig, ModelFamily, WeightSource, Check | None, dict[str, Any], list[Path]]:
    """What a `Source` is made of. Raises ConfigError and UnsupportedModelError."""
    file = GgufFile(path)
    family, is_permuted = family_of_gguf(gguf_name(file.metadata))
    config = adapted_config(file, family)
    config = replace(config, rope=config.rope.within(config.context_length(engine_config.max_model_len)))
    if (dummy := dummy_weights(engine_config, dtype, device)) is not None:
        return config, family, dummy[0], None, dummy[1], []
    weights = weights_of(file, config, is_permuted, dtype, device)
    return config, family, weights, partial(check_weights, found=weights.shapes), {}, file.files


def block_conversion(
    weights: WeightSource, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> Conversion | None:
    """Return the conversion to blocks; None for other settings, weights of other types, or a CPU without kernels."""
    if config.quant_mode != "auto" or device.type != "cpu" or dtype != torch.bfloat16:
        return None
    made: Conversion | None = None
    if isinstance(weights, GgufMxfp4Weights):
        weights = weights.of_file
    if isinstance(weights, GgufWeights) and weights.has_most_in_blocks:
        made = PackedConversion(weights, dtype)
    elif isinstance(weights, Mxfp4Source):
        made = PackedConversion(CheckpointBlocks(weights), dtype)
    elif _is_plain(weights) and config.tp == 1:  # with several ranks weights stay bfloat16
        made = QuantizedConversion(BlockLinears.label, BlockLinears(dtype), plain_mode="int8-weight", dtype=dtype)
    if made is None or library() is None:  # last, since the first call compiles
        return None
    return made


def _is_plain(weights: WeightSource) -> bool:
    """Whether a model of these is computed as fast as can be: the dry-run model is the same everywhere."""
    return isinstance(weights, SafetensorsWeights | DummyWeights)
