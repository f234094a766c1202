"""w4a16_linear against cuBLAS and against the kernels that serve bfloat16, from one row to many.

`--sweep` tries tiles, splits, warps and stages; `choose` in the kernel's file comes from it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.nn import functional

from benchmarks.kernels.quantized import ROWS, SHAPES
from benchmarks.kernels.timing import graph_seconds, num_input_sets, product_options, read_bandwidth, report
from kernels.gpu.small_m_gemm import SmallMWorkspace, small_m_linear
from kernels.gpu.small_m_gemm import choose as choose_bf16
from kernels.gpu.w4a16_gemm import W4Config, choose, w4a16_linear
from kernels.w4a16_gemm import pack_w4

GROUP = 128
ONE_ROW_CONFIGS = [
    W4Config(block_n, block_k, 1, num_warps, num_stages)
    for block_n, block_k, num_warps, num_stages in (
        (8, 512, 1, 3), (8, 512, 1, 1), (16, 512, 2, 3), (16, 512, 1, 2), (8, 1024, 2, 2), (4, 1024, 2, 3),
        (16, 1024, 4, 2), (4, 1024, 1, 1), (4, 512, 1, 1), (4, 512, 1, 3), (8, 256, 1, 4),
    )
]  # fmt: skip
ROWS_CONFIGS = [
    W4Config(64, block_k, split_k, 4, num_stages)
    for block_k, num_stages in ((128, 4), (256, 3), (64, 5))
    for split_k in (1, 2, 4)
]


def measure(name: str, rows_to_try: Sequence[int], sweeps: bool, read: float, workspace: SmallMWorkspace) -> None:
    n, k = SHAPES[name]
    packed = [
        pack_w4(
            torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda"),
            torch.rand(n, k // GROUP, device="cuda"), torch.randn(n, k // GROUP, device="cuda"),
        )
        for _ in range(num_input_sets(n * k // 2, 48))
    ]  # fmt: skip
    plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(num_input_sets(2 * n * k, 48))]
    num_bytes = packed[0].words.nbytes + packed[0].scales_and_zeros.nbytes
    for rows in rows_to_try:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        cublas = graph_seconds([functools.partial(functional.linear, x, weight) for weight in plain])
        own_bf16 = cublas
        config_bf16 = choose_bf16(rows, n, k)
        if config_bf16 is not None:
            own_bf16 = graph_seconds(
                [functools.partial(small_m_linear, x, weight, None, workspace, config_bf16) for weight in plain]
            )
        settings: list[W4Config | None] = [choose(rows, n, k)]
        if sweeps and rows <= 64:
            settings += ONE_ROW_CONFIGS if rows == 1 else ROWS_CONFIGS
        results = []
        for config in settings:
            seconds = graph_seconds(
                [functools.partial(w4a16_linear, x, each, None, workspace, config) for each in packed], 5
            )
            results.append((seconds, f"{config} {seconds * 1e6:.2f}".replace("W4Config", "")))
        ours = results[0][0]
        results.sort(key=lambda result: result[0])
        best = {"best": " | ".join(label for _, label in results[:3])} if sweeps else {}
        report(
            "w4a16_gemm", f"{name} [{rows},{n},{k}]", us=ours * 1e6, cublas_bf16_ratio=cublas / ours,
            own_bf16_ratio=own_bf16 / ours, of_read=num_bytes / ours / read, **best,
        )  # fmt: skip


def main() -> None:
    options = product_options(__doc__, ROWS)
    read = read_bandwidth()
    workspace = SmallMWorkspace(torch.device("cuda"), 1 << 25)
    for name in SHAPES:
        if options.only in name:
            measure(name, options.rows, options.sweep, read, workspace)


if __name__ == "__main__":
    main()
