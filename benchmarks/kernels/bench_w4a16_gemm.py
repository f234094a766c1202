"""w4a16_linear against cuBLAS and against the kernels that serve bfloat16, from one row to many.

`--sweep` tries tiles, splits, warps and stages; `choose` in the kernel's file comes from it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
from torch.nn import functional

from benchmarks.kernels.quantized import ROWS, SHAPES
from benchmarks.kernels.timing import graph_seconds, num_input_sets, product_options, read_bandwidth, report
from kernels.gpu.small_m_gemm import SmallMWorkspace, small_m_linear
from kernels.gpu.small_m_gemm import choose as choose_bf16
from kernels.gpu.w4a16_gemm import MAX_ROWS, W4Config, choose, w4a16_linear
from kernels.w4a16_gemm import pack_w4

GROUP = 128
ONE_ROW_CONFIGS = [
    W4Config(*option)
    for option in (
        (32, 4, 3), (32, 4, 3, 0, 16), (32, 4, 3, 1, 16), (64, 4, 3), (64, 4, 3, 0, 16), (16, 16, 2), (16, 16, 3),
        (16, 16, 3, 1), (16, 16, 3, 0, 16), (32, 16, 2), (32, 8, 3, 0, 16), (16, 4, 3, 4),
    )
]  # fmt: skip
ROWS_CONFIGS = [
    W4Config(*option)
    for option in (
        (64, 4, 2), (64, 4, 3), (32, 4, 3), (32, 8, 2), (64, 2, 3), (32, 8, 3), (64, 8, 2), (16, 8, 3), (16, 4, 2),
        (32, 4, 2), (16, 8, 2), (32, 4, 3, 1),
    )
]  # fmt: skip


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
        if sweeps and rows <= MAX_ROWS:
            settings += ONE_ROW_CONFIGS if rows == 1 else ROWS_CONFIGS
        results = []
        for config in settings:
            try:
                seconds = graph_seconds(
                    [functools.partial(w4a16_linear, x, each, None, config) for each in packed], 5
                )
            except triton.runtime.errors.OutOfResources as error:
                report("skipped", str(config), why=str(error)[:80])
                continue
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
