"""NVIDIA ModelOpt: FP8 with one scale, and NVFP4: e2m1 with an e4m3 scale per 16 columns and one for the tensor.

    weight uint8 (n, k/2): two numbers a byte, the low half first; weight_scale e4m3 (n, k/16), weight_scale_2 float32

Twice an e2m1 number is an integer, so NVFP4 is exactly int8 in groups of 16 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from engine.quantization.formats.fp8 import Fp8
from engine.quantization.formats.scheme import (
    TENSOR,
    CheckpointQuantization,
    K,
    N,
    NotSupportedError,
    Read,
    Stored,
    WeightScheme,
)
from engine.quantization.quantized_rows import QuantizedRows

GROUP_SIZE = 16
DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes, by the low three bits


@dataclass(frozen=True, slots=True)
class Nvfp4(WeightScheme):
    """NVFP4 weights, held in 8 bits: the only GEMMs for e2m1 are those of experts, with another kind of scale."""

    packed: ClassVar[str] = "weight"
    second: ClassVar[str] = "weight_scale_2"
    divides: ClassVar[bool] = False  # whether scales are divided by the second one

    @property
    def held_bits(self) -> int:
        return 8

    def tensors(self, n: int, k: int, found: Mapping[str, object]) -> dict[str, Stored]:
        return {
            self.packed: Stored(("U8",), ((n, -(-k // 2)),), ((N, 1), (K, 2))),
            "weight_scale": Stored(("F8_E4M3",), ((n, self.num_groups(k)),), ((N, 1), (K, GROUP_SIZE))),
            self.second: Stored(("F32",), ((), (1,))),
        }

    def rows(self, n: int, k: int, read: Read, found: Mapping[str, object]) -> QuantizedRows:
        packed = read(self.packed)
        doubles = torch.tensor([*DOUBLES, *(-value for value in DOUBLES)], dtype=torch.int8, device=packed.device)
        values = doubles[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).int()]
        second = read(self.second).float()
        scales = read("weight_scale").float() * ((1 / second if self.divides else second) / 2)
        return self.made_rows(k, values[:, :k], scales)


def parse(config: Mapping[str, Any]) -> CheckpointQuantization:
    algorithm = str(config.get("quant_algo"))
    if algorithm == "FP8":
        return CheckpointQuantization("modelopt-fp8", (Fp8(8, TENSOR, quantizes_inputs=True),))
    if algorithm != "NVFP4" or config.get("group_size", GROUP_SIZE) != GROUP_SIZE:
        raise NotSupportedError(f"ModelOpt's {algorithm} in groups of {config.get('group_size', GROUP_SIZE)!r}")
    return CheckpointQuantization("nvfp4", (Nvfp4(4, (1, GROUP_SIZE)),))
