"""Memory of a model's weights on GPUs, over all ranks, as far as its files show without being read."""

from __future__ import annotations

import math
from pathlib import Path

from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.dummy_weights.settings import DummySettings
from engine.models.config import PLAIN_BITS
from engine.models.hf_config import read_hf_config

MADE_BITS = {"int8-weight": 8, "w8a8": 8, "fp8": 8, "int4-weight": 4.5}  # 4.5: with scales
PACKED_DTYPES = ("auto", "bfloat16")  # dtypes with which quantized checkpoints stay as they are


def weight_bytes(engine: EngineConfig) -> int:
    """Return the bytes of weights; 0: unknown. Raises UnsupportedModelError for an unknown quantization."""
    files = resolve_model(engine.model)
    if engine.of(DummySettings).load_format == "dummy" or files.kind == "dry-run":
        return 0
    stored_bits, held_bits = PLAIN_BITS, PLAIN_BITS
    if files.kind == "gguf":
        from common.gguf.parts import read_gguf

        tensors = read_gguf(files.path).tensors
        total = sum(2 * math.prod(tensor.shape) for tensor in tensors.values())  # read as 16-bit numbers
    else:
        stored = (path for path in files.path.glob("*.safetensors") if not path.name.startswith("consolidated"))
        total = sum(path.stat().st_size for path in stored)
        stored_bits, held_bits = _bits(files.path)
    if stored_bits < PLAIN_BITS and engine.quant_mode == "auto" and engine.dtype in PACKED_DTYPES:
        return total * held_bits // stored_bits
    return int(total * MADE_BITS.get(engine.quant_mode, PLAIN_BITS) / stored_bits)


def _bits(directory: Path) -> tuple[int, int]:
    """Return bits of most weights in the files, and in memory if they stay quantized."""
    if not (directory / "config.json").is_file():
        return PLAIN_BITS, PLAIN_BITS
    raw = read_hf_config(directory)
    if not (raw.get("quantization_config") or raw.get("compression_config")):
        return PLAIN_BITS, PLAIN_BITS
    from engine.loader.source import quantized_checkpoint  # imports torch, which takes a second

    quantized = quantized_checkpoint(raw)
    assert quantized is not None
    return quantized.bits, quantized.held_bits
