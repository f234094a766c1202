"""One byte per weight: e4m3 as DeepSeek and others publish it, and int8 of compressed-tensors.

weight e4m3 or int8 (n, k), weight_scale (), (1,), (n,), (n, k/g) or one per block, weight_zero_point of the same
shape. weight_scale_inv is a factor, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.quantization.formats.scheme import (
    FLOATS,
    ROW,
    TENSOR,
    CheckpointQuantization,
    K,
    N,
    NotSupportedError,
    Read,
    Stored,
    WeightScheme,
    block_of,
)
from engine.quantization.quantized_rows import QuantizedRows


@dataclass(frozen=True, slots=True)
class Int8(WeightScheme):
    """int8 weights."""

    stored_type: ClassVar[str] = "I8"

    def tensors(self, n: int, k: int, found: Mapping[str, object]) -> dict[str, Stored]:
        shapes, blocks = self.scale_shapes(n, k), ((N, self.block[0]), (K, self.block[1]))
        zeros = {} if self.is_symmetric else {"weight_zero_point": Stored(("I8",), shapes, blocks)}
        weight = Stored((self.stored_type,), ((n, k),), ((N, 1), (K, 1)))
        return {"weight": weight, _scale_name(found): Stored(FLOATS, shapes, blocks), **zeros}

    def rows(self, n: int, k: int, read: Read, found: Mapping[str, object]) -> QuantizedRows:
        scales = self.per_row(n, k, read(_scale_name(found)).float())
        offsets = None
        if not self.is_symmetric:
            offsets = -self.per_row(n, k, read("weight_zero_point").float()) * scales
        return self.made_rows(k, read("weight"), scales, offsets)


@dataclass(frozen=True, slots=True)
class Fp8(Int8):
    """e4m3 weights."""

    stored_type: ClassVar[str] = "F8_E4M3"


def parse(config: Mapping[str, Any]) -> CheckpointQuantization:
    if config.get("fmt", "e4m3") != "e4m3":
        raise NotSupportedError(f"FP8 of the format {config['fmt']!r}")
    block = config.get("weight_block_size")
    blocks = [block_of(block)] if block else [TENSOR, ROW]
    schemes = tuple(Fp8(8, shared, quantizes_inputs=True) for shared in blocks)
    return CheckpointQuantization("fp8-blocks" if block else "fp8-weights", schemes)


def _scale_name(found: Mapping[str, object]) -> str:
    return "weight_scale_inv" if "weight_scale_inv" in found else "weight_scale"
