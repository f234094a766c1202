"""gated_linear against cuBLAS followed by `silu_mul`: read bandwidth of the weight where it is used."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.timing import graph_seconds, num_input_sets, read_bandwidth, report
from kernels.gpu.gated_gemm import gated_linear
from kernels.gpu.silu_mul import silu_mul
from kernels.gpu.tuning import SKINNY_GATED

SHAPES = {"qwen2.5-7b": (18944, 3584), "llama3.1-8b": (14336, 4096), "qwen3-8b": (12288, 4096)}
ROWS = (8, 16, 64)


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return silu_mul(functional.linear(x, weight))


def main() -> None:
    read = read_bandwidth()
    for name, (n, k) in SHAPES.items():
        weights = [torch.randn(2 * n, k, device="cuda").bfloat16() for _ in range(num_input_sets(4 * n * k))]
        for rows in ROWS:
            config = SKINNY_GATED.find(rows, n, k)
            if config is None:
                continue
            x = torch.randn(rows, k, device="cuda").bfloat16()
            apart = graph_seconds([functools.partial(plain, x, weight) for weight in weights])
            seconds = graph_seconds([functools.partial(gated_linear, x, weight, None, config) for weight in weights])
            report(
                "gated_gemm", f"{name} [{rows},{2 * n},{k}]", us=seconds * 1e6, apart_ratio=apart / seconds,
                of_read=4 * n * k / seconds / read,
            )  # fmt: skip


if __name__ == "__main__":
    main()
