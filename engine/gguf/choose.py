"""Which weights a CPU computes in a GGUF file's blocks: those of files, experts in MXFP4, and plain ones."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.gguf.mxfp4 import CheckpointBlocks, GgufMxfp4Weights
from engine.gguf.packed import PackedConversion
from engine.gguf.q8_0 import BlockLinears
from engine.gguf.weights import GgufWeights
from engine.layers.weights import WeightSource
from engine.loader.conversion import Conversion
from engine.loader.random_weights import RandomWeights
from engine.loader.safetensors import SafetensorsWeights
from engine.quantization.conversion import QuantizedConversion
from engine.quantization.mxfp4 import Mxfp4Source
from kernels.gguf.library import library


def block_conversion(
    weights: WeightSource, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> Conversion | None:
    """None where another is to be chosen: for other settings, weights of other types, a machine without the code."""
    if config.quant_mode != "auto" or device.type != "cpu" or dtype != torch.bfloat16:
        return None
    made: Conversion | None = None
    if isinstance(weights, GgufMxfp4Weights):
        weights = weights.of_file
    if isinstance(weights, GgufWeights) and weights.has_most_in_blocks:
        made = PackedConversion(weights, dtype)
    elif isinstance(weights, Mxfp4Source):
        made = PackedConversion(CheckpointBlocks(weights), dtype)
    elif isinstance(weights, SafetensorsWeights | RandomWeights) and config.tp == 1:  # ranks keep bfloat16
        made = QuantizedConversion(BlockLinears.label, BlockLinears(dtype), plain_mode="int8-weight", dtype=dtype)
    if made is None or library() is None:  # asked last: the first time it compiles
        return None
    return made
