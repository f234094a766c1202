"""Random weights of a layer of experts in every format that its kernels support."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.moe.expert_formats import bytes_of
from kernels.quantization.mxfp4 import GROUP_SIZE, filled

BLOCK = 128  # columns that share a scale in fp8-blocks


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    num_experts: int
    top_k: int


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "deepseek-v2-lite": Shape(2048, 1408, 64, 6),
    "deepseek-v3": Shape(7168, 2048, 256, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
}


@dataclass(frozen=True)
class Weights:
    """Weights of all experts of a layer, and their scales."""

    weight: Tensor
    scales: Tensor | None

    @property
    def itemsize(self) -> float:
        return bytes_of(self.weight)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)


def plain(experts: int, rows: int, columns: int, group: int) -> Weights:
    return Weights(torch.randn(experts, rows, columns, dtype=torch.bfloat16) * columns**-0.5, None)


def eight_bits(experts: int, rows: int, columns: int, group: int) -> Weights:
    weight = plain(experts, rows, columns, group).weight
    return Weights(weight.to(torch.float8_e4m3fn), torch.ones(experts, rows))


def blocks(experts: int, rows: int, columns: int, group: int) -> Weights:
    quantized = eight_bits(experts, rows, columns, group)
    return Weights(quantized.weight, torch.ones(experts, rows, columns // BLOCK))


def words(experts: int, rows: int, columns: int) -> Tensor:
    size = experts, rows, columns // 4
    return torch.randint(-(1 << 15), (1 << 15) - 1, size, dtype=torch.int16)


def int4(experts: int, rows: int, columns: int, group: int) -> Weights:
    pairs = torch.rand(experts, rows, columns // group, 2, dtype=torch.bfloat16) * columns**-0.5
    return Weights(words(experts, rows, columns), pairs)


def mxfp4(experts: int, rows: int, columns: int, group: int) -> Weights:
    size = experts, rows, filled(columns) // GROUP_SIZE
    exponents = torch.randint(118, 122, size, dtype=torch.uint8)
    return Weights(words(experts, rows, filled(columns)), exponents)


MAKERS = {"bfloat16": plain, "fp8": eight_bits, "fp8-blocks": blocks, "int4": int4, "mxfp4": mxfp4}


def weights_of(dtype: str, shape: Shape, group: int) -> tuple[Weights, Weights]:
    """Return gate_up and down, on the GPU."""
    make, inner = MAKERS[dtype], filled(shape.inner) if dtype == "mxfp4" else shape.inner
    with torch.device("cuda"):
        return (
            make(shape.num_experts, 2 * inner, shape.hidden, group),
            make(shape.num_experts, shape.hidden, inner, group),
        )
