"""`benchmarks.engine` over random 4-bit weights in groups of 128, as a GPTQ or AWQ checkpoint would give them.

    python -m benchmarks.engine_int4 --model benchmarks/configs/qwen2.5-7b --load-format dummy --batch 1,8 --json

On a GPU alone. Every map gets codes and scales of its own, the output projection too; the engine is the one that
serves. Its floor counts a scale and an offset for 32 weights, so fractions of it come out a little high.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

import engine.loader.load
import engine.loader.quantize
from benchmarks.engine import main
from engine.gpu.quantized import W4A16Linear
from engine.layers.linear import Linear, LinearMap
from engine.loader.gguf_int4 import Int4Rows
from engine.loader.random_weights import STD
from kernels.w4a16_gemm import pack_w4

GROUP = 128
CODES_STD = 4.6  # of codes from 0 to 15 that are all as likely


class RandomInt4(engine.loader.quantize.GpuMaps):
    """Every map of so many rows and columns."""

    def convert(self, linear: Linear, parts: Sequence[Int4Rows], is_head: bool = False) -> LinearMap:
        n, k = linear.weight.shape
        device = linear.weight.device
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
        scales = torch.full((n, k // GROUP), STD / CODES_STD, device=device)
        return W4A16Linear(pack_w4(codes, scales, 0.5 * scales), linear.bias)


if __name__ == "__main__":
    engine.loader.quantize.GpuMaps = RandomInt4  # type: ignore[misc]
    engine.loader.load.resolve_quant_mode = lambda *_: "int4-weight"
    sys.exit(main())
