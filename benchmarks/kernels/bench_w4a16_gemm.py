"""w4a16_linear against cuBLAS and against the kernels that serve bfloat16, from one row to many.

`--sweep` tries tiles, splits, warps and stages; the tables in `kernels/gpu/tuning.py` come from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import triton
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.quantized import ROWS, SHAPES
from benchmarks.kernels.timing import gemm_options, graph_seconds, num_input_sets, read_bandwidth, report
from engine.gpu.ops.plain import gemm
from engine.layers.linear import Linear
from kernels.gpu.quantize import quantize_with_sums
from kernels.gpu.split_k import SplitKWorkspace
from kernels.gpu.tuning import SlicedKConfig, TileConfig
from kernels.gpu.w4_planes_gemm import w4_planes_gemm
from kernels.gpu.w4a16_gemm import MAX_ROWS, w4_skinny_gemm, w4a16_linear
from kernels.w4a16_gemm import PackedW4, pack_w4

GROUPS = (128, 32)
ONE_ROW_CONFIGS = [
    SlicedKConfig(block_n, 128, *option)
    for block_n, *option in (
        (32, 4, 3), (32, 4, 3, 0, 16), (32, 4, 3, 1, 16), (64, 4, 3), (64, 4, 3, 0, 16), (16, 16, 2), (16, 16, 3),
        (16, 16, 3, 1), (16, 16, 3, 0, 16), (32, 16, 2), (32, 8, 3, 0, 16), (16, 4, 3, 4),
    )
]  # fmt: skip
FEW_ROWS_CONFIGS = [
    SlicedKConfig(block_n, 128, *option)
    for block_n, *option in (
        (64, 4, 2), (64, 4, 3), (32, 4, 3), (32, 8, 2), (64, 2, 3), (32, 8, 3), (64, 8, 2), (16, 8, 3), (16, 4, 2),
        (32, 4, 2), (16, 8, 2), (32, 4, 3, 1),
    )
]  # fmt: skip


PLANES_CONFIGS = [
    TileConfig(block_n, 128, split_k, num_warps, num_stages, block_m)
    for block_m in (16, 32, 64, 128)
    for block_n, num_warps, num_stages in ((64, 4, 3), (64, 4, 5), (128, 8, 3), (128, 4, 4))
    for split_k in (1, 2, 4, 8)
]
Gemm = Callable[[PackedW4], Tensor]


def measure(
    name: str, group: int, rows_to_try: Sequence[int], sweeps: bool, read: float, workspace: SplitKWorkspace
) -> None:
    n, k = SHAPES[name]
    packed = [
        pack_w4(
            torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda"),
            torch.rand(n, k // group, device="cuda"), torch.randn(n, k // group, device="cuda"),
        )
        for _ in range(num_input_sets(n * k // 2, 48))
    ]  # fmt: skip
    plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(num_input_sets(2 * n * k, 48))]
    num_bytes = packed[0].words.nbytes + packed[0].scales_and_zeros.nbytes
    for rows in rows_to_try:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        cublas = graph_seconds([functools.partial(functional.linear, x, weight) for weight in plain])
        own_bf16 = graph_seconds([functools.partial(gemm(Linear(weight), rows, workspace), x) for weight in plain])
        ours = graph_seconds([functools.partial(w4a16_linear, x, each, None, workspace) for each in packed], 5)
        best = {"best": " | ".join(best_settings(x, group, packed, workspace))} if sweeps else {}
        report(
            "w4a16_gemm", f"{name} [{rows},{n},{k}] / {group}", us=ours * 1e6, cublas_bf16_ratio=cublas / ours,
            own_bf16_ratio=own_bf16 / ours, of_read=num_bytes / ours / read, **best,
        )  # fmt: skip


def best_settings(x: Tensor, group: int, packed: Sequence[PackedW4], workspace: SplitKWorkspace) -> list[str]:
    """The best three with their times in us; those of int8 planes without the quantization of x."""
    results = []
    for label, call in settings(x, group, workspace):
        try:
            seconds = graph_seconds([functools.partial(call, each) for each in packed], 5)
        except (ValueError, triton.runtime.errors.OutOfResources) as error:
            report("skipped", label, why=str(error)[:80])
            continue
        results.append((seconds, f"{label} {seconds * 1e6:.2f}"))
    return [label for _, label in sorted(results)[:3]]


def settings(x: Tensor, group: int, workspace: SplitKWorkspace) -> Iterator[tuple[str, Gemm]]:
    rows = x.shape[0]
    if rows <= MAX_ROWS:
        for few in ONE_ROW_CONFIGS if rows == 1 else FEW_ROWS_CONFIGS:
            yield str(few), lambda each, few=few: w4_skinny_gemm(x, each, None, few)
    quantized = quantize_with_sums(x, group)
    for config in PLANES_CONFIGS:
        if config.block_m <= 2 * rows:
            yield (
                str(config),
                lambda each, config=config: w4_planes_gemm(*quantized, each, None, x.dtype, workspace, config),
            )


def main() -> None:
    options = gemm_options(__doc__, ROWS)
    read = read_bandwidth()
    workspace = SplitKWorkspace(torch.device("cuda"), 1 << 26)
    for name in SHAPES:
        for group in GROUPS:
            if options.only in name:
                measure(name, group, options.rows, options.sweep, read, workspace)


if __name__ == "__main__":
    main()
