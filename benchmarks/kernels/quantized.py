"""What the benchmarks of quantized GEMMs share: shapes, and tables of one kind of 8-bit weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.timing import gemm_options, graph_seconds, num_input_sets, read_bandwidth, report
from kernels.gpu.quantize import quantize_rows
from kernels.gpu.skinny_gemm import skinny_gemm
from kernels.gpu.sliced_k_gemm import MAX_ROWS, sliced_k_gemm
from kernels.gpu.split_k import SplitKWorkspace
from kernels.gpu.tuning import SlicedKConfig, TileConfig

SHAPES = {
    "qwen2.5-7b qkv": (4608, 3584), "qwen2.5-7b o": (3584, 3584), "qwen2.5-7b gate_up": (37888, 3584),
    "qwen2.5-7b down": (3584, 18944), "qwen2.5-7b lm_head": (152064, 3584), "qwen3-0.6b qkv": (4096, 1024),
    "qwen3-0.6b o": (1024, 2048), "qwen3-0.6b gate_up": (6144, 1024), "qwen3-0.6b down": (1024, 3072),
}  # fmt: skip
ROWS = (1, 8, 64, 256, 2048)
FEW_ROWS_CONFIGS = [
    TileConfig(*option)
    for option in (
        (64, 256, 1, 4, 4), (64, 256, 2, 4, 4), (64, 256, 4, 4, 4), (64, 128, 1, 4, 6), (64, 128, 2, 4, 6),
        (64, 512, 1, 4, 3), (64, 512, 2, 4, 3), (128, 128, 1, 4, 5), (128, 128, 2, 4, 5),
    )
]  # fmt: skip
SLICED_K_CONFIGS = [
    SlicedKConfig(*option)
    for option in (
        (16, 128, 4, 4), (16, 128, 4, 6), (16, 128, 4, 3, 4), (16, 128, 4, 3, 6), (16, 128, 4, 8, 2), (16, 256, 4, 4),
        (16, 128, 2, 5, 1), (32, 128, 4, 4), (16, 256, 8, 3),
    )
]  # fmt: skip
MANY_ROWS_CONFIGS = [
    TileConfig(*option)
    for option in (
        (64, 128, 1, 4, 4, 128), (128, 128, 1, 8, 4, 128), (128, 128, 1, 8, 3, 256), (128, 128, 1, 8, 4, 256),
        (256, 128, 1, 8, 3, 128), (128, 128, 1, 4, 4, 128),
    )
]  # fmt: skip
Gemm = Callable[[Tensor, Tensor, Tensor, Tensor | None, SplitKWorkspace], Tensor]


@dataclass(frozen=True)
class EightBit:
    """One kind of GEMM: its name, the type of its weights, the function that serves, torch's own."""

    name: str
    dtype: torch.dtype
    num_planes: int  # of activations
    gemm: Gemm
    library: Callable[[Tensor, Tensor, Tensor], object] | None  # of x, weight, scales; quantizes x too

    def weights(self, n: int, k: int) -> list[tuple[Tensor, Tensor]]:
        count = num_input_sets(n * k, 48)
        return [quantize_rows(torch.randn(n, k, device="cuda").bfloat16(), self.dtype) for _ in range(count)]


def run(description: str | None, *kinds: EightBit) -> None:
    """Run the benchmark of these kinds, as its command line asks."""
    options = gemm_options(description, ROWS)
    read = read_bandwidth()
    workspace = SplitKWorkspace(torch.device("cuda"), 1 << 24)
    for kind in kinds:
        for name in SHAPES:
            if options.only in name:
                (sweep if options.sweep else table)(kind, name, options.rows, read, workspace)


def table(kind: EightBit, name: str, rows_to_try: Sequence[int], read: float, workspace: SplitKWorkspace) -> None:
    """What serves against bfloat16 in cuBLAS and torch's own GEMM of the kind."""
    n, k = SHAPES[name]
    weights = kind.weights(n, k)
    plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(num_input_sets(2 * n * k, 48))]
    for rows in rows_to_try:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        figures: dict[str, float] = {}
        bf16 = graph_seconds([functools.partial(functional.linear, x, weight) for weight in plain])
        ours = graph_seconds([functools.partial(kind.gemm, x, *pair, None, workspace) for pair in weights])
        if kind.library is not None and rows > 16:
            library = graph_seconds([functools.partial(kind.library, x, *pair) for pair in weights])
            figures["library_ratio"] = library / ours
        report(
            kind.name, f"{name} [{rows},{n},{k}]", us=ours * 1e6, cublas_bf16_ratio=bf16 / ours,
            of_read=n * k / ours / read, tflops=2 * rows * n * k / ours / 1e12, **figures,
        )  # fmt: skip


def sweep(kind: EightBit, name: str, rows_to_try: Sequence[int], read: float, workspace: SplitKWorkspace) -> None:
    """The best three settings per number of rows; activations are quantized beforehand."""
    n, k = SHAPES[name]
    weights = kind.weights(n, k)
    for rows in rows_to_try:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        values, x_scales = quantize_rows(x, kind.dtype, kind.num_planes)
        num_plane_rows = values.shape[0]
        results: list[tuple[float, str]] = []
        if num_plane_rows <= MAX_ROWS:
            for sliced in SLICED_K_CONFIGS:
                _measure(str(sliced), functools.partial(_sliced_k, values, x_scales, sliced), weights, results)
        for config in MANY_ROWS_CONFIGS if num_plane_rows > 64 else FEW_ROWS_CONFIGS:
            call = functools.partial(_tiled, values, x_scales, config, workspace)
            _measure(str(config), call, weights, results)
        if kind.library is not None and rows > 16:
            _measure("library with quantization", functools.partial(kind.library, x), weights, results)
        _measure("as served, with quantization", functools.partial(_serve, kind, x, workspace), weights, results)
        results.sort()
        report(
            f"{kind.name} sweep", f"{name} [{rows},{n},{k}]", best=" | ".join(label for _, label in results[:4]),
            worst=results[-1][1], of_read=n * k / results[0][0] / read,
            tflops=2 * rows * n * k / results[0][0] / 1e12,
        )  # fmt: skip


def _measure(
    label: str, call: Callable[[Tensor, Tensor], object], weights: Sequence[tuple[Tensor, Tensor]],
    out: list[tuple[float, str]],
) -> None:  # fmt: skip
    try:
        seconds = graph_seconds([functools.partial(call, *pair) for pair in weights], 5)
        out.append((seconds, f"{label} {seconds * 1e6:.2f}"))
    except (RuntimeError, ValueError, triton.runtime.errors.TritonError) as error:  # tiles or partial sums too large
        report("skipped", label, why=str(error)[:80])


def _serve(kind: EightBit, x: Tensor, workspace: SplitKWorkspace, weight: Tensor, scales: Tensor) -> Tensor:
    return kind.gemm(x, weight, scales, None, workspace)


def _tiled(
    values: Tensor, x_scales: Tensor, config: TileConfig, workspace: SplitKWorkspace, weight: Tensor,
    scales: Tensor,
) -> Tensor:  # fmt: skip
    return skinny_gemm(values, weight, None, workspace, config, x_scales, scales, torch.bfloat16)


def _sliced_k(values: Tensor, x_scales: Tensor, config: SlicedKConfig, weight: Tensor, scales: Tensor) -> Tensor:
    return sliced_k_gemm(values, x_scales, weight, scales, None, torch.bfloat16, config)
