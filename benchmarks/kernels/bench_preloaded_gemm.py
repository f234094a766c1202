"""preloaded_linear against cuBLAS, one launch behind the other over rotating weights, as in a step."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from benchmarks.kernels.timing import gemm_options, graph_seconds, num_input_sets, read_bandwidth, report
from kernels.gpu.preloaded_gemm import preloaded_linear
from kernels.gpu.tuning import PRELOADED

SHAPES = {
    "qwen3-0.6b qkv": (4096, 1024), "qwen3-0.6b o": (1024, 2048), "qwen3-0.6b gate_up": (6144, 1024),
    "qwen3-0.6b down": (1024, 3072), "qwen3-1.7b qkv": (4096, 2048), "qwen3-1.7b down": (2048, 6144),
}  # fmt: skip
ROWS = (1, 8, 32, 64)


def main() -> None:
    options = gemm_options(__doc__, ROWS)
    read = read_bandwidth()
    for name, (n, k) in SHAPES.items():
        if options.only not in name:
            continue
        weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(num_input_sets(2 * n * k))]
        for rows in options.rows:
            config = PRELOADED.find(rows, n, k)
            if config is None:
                continue
            x = torch.randn(rows, k, device="cuda").bfloat16()
            cublas = graph_seconds([functools.partial(functional.linear, x, weight) for weight in weights])
            seconds = graph_seconds(
                [functools.partial(preloaded_linear, x, weight, None, config) for weight in weights]
            )
            report(
                "preloaded_gemm", f"{name} [{rows},{n},{k}]", us=seconds * 1e6, config=str(config),
                cublas_ratio=cublas / seconds, of_read=2 * n * k / seconds / read,
            )  # fmt: skip


if __name__ == "__main__":
    main()
