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
from kernels.gpu.eight_bit import RowsConfig, several_rows
from kernels.gpu.few_codes import MAX_FEW_ROWS, FewConfig, few_rows
from kernels.gpu.rounding import quantize_rows
from kernels.gpu.small_m_gemm import SmallMWorkspace

SHAPES = {
    "qwen2.5-7b qkv": (4608, 3584), "qwen2.5-7b o": (3584, 3584), "qwen2.5-7b gate_up": (37888, 3584),
    "qwen2.5-7b down": (3584, 18944), "qwen2.5-7b lm_head": (152064, 3584), "qwen3-0.6b qkv": (4096, 1024),
    "qwen3-0.6b o": (1024, 2048), "qwen3-0.6b gate_up": (6144, 1024), "qwen3-0.6b down": (1024, 3072),
}  # fmt: skip
ROWS = (1, 8, 64, 256, 2048)
FEW_ROWS_CONFIGS = [
    RowsConfig(0, *option)
    for option in (
        (64, 256, 1, 4, 4), (64, 256, 2, 4, 4), (64, 256, 4, 4, 4), (64, 128, 1, 4, 6), (64, 128, 2, 4, 6),
        (64, 512, 1, 4, 3), (64, 512, 2, 4, 3), (128, 128, 1, 4, 5), (128, 128, 2, 4, 5),
    )
]  # fmt: skip
CODES_CONFIGS = [
    FewConfig(*option)
    for option in (
        (16, 128, 4, 4), (16, 128, 4, 6), (16, 128, 4, 3, 4), (16, 128, 4, 3, 6), (16, 128, 4, 8, 2), (16, 256, 4, 4),
        (16, 128, 2, 5, 1), (32, 128, 4, 4), (16, 256, 8, 3),
    )
]  # fmt: skip
MANY_ROWS_CONFIGS = [
    RowsConfig(*option)
    for option in (
        (128, 64, 128, 1, 4, 4), (128, 128, 128, 1, 8, 4), (256, 128, 128, 1, 8, 3), (256, 128, 128, 1, 8, 4),
        (128, 256, 128, 1, 8, 3), (128, 128, 128, 1, 4, 4),
    )
]  # fmt: skip
Gemm = Callable[[Tensor, Tensor, Tensor, Tensor | None, SmallMWorkspace], Tensor]


@dataclass(frozen=True)
class EightBit:
    """One kind of GEMM: its name, the type of its weights, the function that serves, torch's own."""

    name: str
    dtype: torch.dtype
    digits: int  # of activations
    gemm: Gemm
    library: Callable[[Tensor, Tensor, Tensor], object] | None  # of x, weight, scales; rounds x too

    def weights(self, n: int, k: int) -> list[tuple[Tensor, Tensor]]:
        count = num_input_sets(n * k, 48)
        return [quantize_rows(torch.randn(n, k, device="cuda").bfloat16(), self.dtype) for _ in range(count)]


def run(description: str | None, *kinds: EightBit) -> None:
    """Run the benchmark of these kinds, as its command line asks."""
    options = gemm_options(description, ROWS)
    read = read_bandwidth()
    workspace = SmallMWorkspace(torch.device("cuda"), 1 << 24)
    for kind in kinds:
        for name in SHAPES:
            if options.only in name:
                (sweep if options.sweep else table)(kind, name, options.rows, read, workspace)


def table(kind: EightBit, name: str, rows_to_try: Sequence[int], read: float, workspace: SmallMWorkspace) -> None:
    """Table of the serving GEMM against cuBLAS in bfloat16 and torch's own GEMM of the kind."""
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


def sweep(kind: EightBit, name: str, rows_to_try: Sequence[int], read: float, workspace: SmallMWorkspace) -> None:
    """The best three settings per number of rows; activations are quantized beforehand for several rows."""
    n, k = SHAPES[name]
    weights = kind.weights(n, k)
    for rows in rows_to_try:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        codes, x_scales = quantize_rows(x, kind.dtype, kind.digits)
        num_codes = codes.shape[0]
        results: list[tuple[float, str]] = []
        if num_codes <= MAX_FEW_ROWS:
            for few_config in CODES_CONFIGS:
                label = str(few_config).replace("FewConfig", "few ")
                _measure(label, functools.partial(_few, codes, x_scales, few_config), weights, results)
        few = [RowsConfig(max(16, num_codes), *_rest(c)) for c in FEW_ROWS_CONFIGS] if num_codes <= 64 else []
        for config in few + MANY_ROWS_CONFIGS * (num_codes > 64):
            label = (
                f"{config.block_m}x{config.block_n}x{config.block_k}/{config.split_k} w{config.num_warps} "
                f"s{config.num_stages}"
            )
            call = functools.partial(_several, codes, x_scales, config, workspace)
            _measure(label, call, weights, results)
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


def _serve(kind: EightBit, x: Tensor, workspace: SmallMWorkspace, weight: Tensor, scales: Tensor) -> Tensor:
    return kind.gemm(x, weight, scales, None, workspace)


def _several(
    codes: Tensor, x_scales: Tensor, config: RowsConfig, workspace: SmallMWorkspace, weight: Tensor,
    scales: Tensor,
) -> Tensor:  # fmt: skip
    return several_rows(codes, x_scales, weight, scales, None, torch.bfloat16, workspace, config)


def _few(codes: Tensor, x_scales: Tensor, config: FewConfig, weight: Tensor, scales: Tensor) -> Tensor:
    return few_rows(codes, x_scales, weight, scales, None, torch.bfloat16, config)


def _rest(config: RowsConfig) -> tuple[int, int, int, int, int]:
    return config.block_n, config.block_k, config.split_k, config.num_warps, config.num_stages
