"""small_m_linear against cuBLAS: read bandwidth of the weight at 1 to 64 rows, for the shapes of the models served.

`--sweep` tries tiles, splits, warps and stages; `choose` in the kernel's file comes from it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.timing import gemm_options, graph_seconds, num_input_sets, read_bandwidth, report
from kernels.gpu.rms_norm import add_rms_norm, rms_norm
from kernels.gpu.silu_mul import silu_mul
from kernels.gpu.small_m_gemm import FUSED_GEMV, SmallMConfig, SmallMWorkspace, choose, gemv, small_m_linear

SHAPES = {
    "qwen2.5-7b qkv": (4608, 3584), "qwen2.5-7b o": (3584, 3584), "qwen2.5-7b gate_up": (37888, 3584),
    "qwen2.5-7b down": (3584, 18944), "8b qkv": (6144, 4096), "8b o": (4096, 4096), "llama3.1-8b down": (4096, 14336),
    "qwen3-8b down": (4096, 12288),
    "qwen2.5-7b lm_head": (152064, 3584), "qwen3-0.6b lm_head": (151936, 1024), "qwen3-0.6b qkv": (4096, 1024),
    "qwen3-0.6b o": (1024, 2048),
    "qwen3-0.6b gate_up": (6144, 1024), "qwen3-0.6b down": (1024, 3072),
}  # fmt: skip
LAYERS = {"qwen2.5-7b": (3584, 3584, 18944, 4608), "qwen3-0.6b": (1024, 2048, 3072, 4096)}
ROWS = (1, 8, 32)
GEMVS = [
    SmallMConfig(block_n, block_k, 1, num_warps, num_stages, is_gemv=True)
    for block_n, block_k, num_warps in (
        (4, 512, 4),
        (8, 512, 4),
        (16, 512, 4),
        (2, 512, 2),
        (4, 1024, 4),
        (4, 256, 2),
    )
    for num_stages in (1, 3, 5)
]
DOTS = [
    SmallMConfig(*option)
    for option in (
        (64, 128, 1, 4, 6), (64, 128, 2, 4, 6), (64, 128, 1, 4, 4), (64, 128, 4, 4, 4), (64, 64, 1, 4, 8),
        (32, 128, 1, 4, 6), (32, 128, 1, 4, 8), (32, 256, 1, 4, 4), (32, 128, 2, 4, 6), (16, 256, 1, 4, 4),
        (16, 256, 1, 4, 6), (16, 512, 1, 4, 3), (32, 128, 1, 2, 6), (128, 64, 1, 4, 6),
    )
]  # fmt: skip


def sweep_shape(
    name: str, n: int, k: int, rows_to_try: Sequence[int], read: float, workspace: SmallMWorkspace
) -> None:
    weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(num_input_sets(2 * n * k, 48))]
    for rows in rows_to_try:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        cublas = graph_seconds([functools.partial(functional.linear, x, weight) for weight in weights], 5)
        results = []
        for config in GEMVS * (rows == 1) + DOTS:
            calls = [functools.partial(small_m_linear, x, weight, None, workspace, config) for weight in weights]
            if k % config.block_k == 0:
                results.append((graph_seconds(calls, 5), config))
        results.sort(key=lambda result: result[0])
        best = " | ".join(
            f"{'gemv' if c.is_gemv else 'dot'} {c.block_n}x{c.block_k}/{c.split_k} w{c.num_warps} s{c.num_stages} "
            f"{seconds * 1e6:.2f}"
            for seconds, c in results[:3]
        )
        report(
            "small_m_gemm", f"{name} [{rows},{n},{k}]", cublas_us=cublas * 1e6, best=best,
            cublas_ratio=cublas / results[0][0], of_read=2 * n * k / results[0][0] / read,
        )  # fmt: skip


def chosen_shape(
    name: str, n: int, k: int, rows_to_try: Sequence[int], read: float, workspace: SmallMWorkspace
) -> None:
    weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(num_input_sets(2 * n * k, 48))]
    for rows in rows_to_try:
        config = choose(rows, n, k)
        if config is None:
            continue
        x = torch.randn(rows, k, device="cuda").bfloat16()
        cublas = graph_seconds([functools.partial(functional.linear, x, weight) for weight in weights])
        seconds = graph_seconds(
            [functools.partial(small_m_linear, x, weight, None, workspace, config) for weight in weights]
        )
        report(
            "small_m_gemm", f"{name} [{rows},{n},{k}]", us=seconds * 1e6, cublas_ratio=cublas / seconds,
            of_read=2 * n * k / seconds / read,
        )  # fmt: skip


def layer_seconds(hidden: int, heads: int, inner: int, qkv: int, is_fused: bool) -> float:
    """Time one row through the four GEMMs of a decoder layer with their norms, activation and additions."""
    count = num_input_sets(2 * hidden * (qkv + heads + 3 * inner), 24)
    shapes = [(qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]
    layers = [[torch.randn(n, k, device="cuda").bfloat16() * k**-0.5 for n, k in shapes] for _ in range(count)]
    residual, attended = (torch.randn(1, n, device="cuda").bfloat16() for n in (hidden, heads))
    norm = torch.ones(hidden, device="cuda").bfloat16()
    workspace = SmallMWorkspace(residual.device)
    configs = [choose(1, *shape) for shape in shapes]
    assert all(config is not None for config in configs)
    q, o, g, d = (config for config in configs if config is not None)

    def fused(weights: list[Tensor]) -> None:
        gemv(residual, weights[0], None, FUSED_GEMV, norm, 1e-6)
        gemv(attended, weights[1], None, o, added_to=residual)
        inner_row = gemv(residual, weights[2], None, FUSED_GEMV, norm, 1e-6, is_gated=True)
        gemv(inner_row, weights[3], None, d, added_to=residual)

    def plain(weights: list[Tensor]) -> None:
        small_m_linear(rms_norm(residual, norm, 1e-6), weights[0], None, workspace, q)
        out = small_m_linear(attended, weights[1], None, workspace, o)
        gate_up = small_m_linear(add_rms_norm(out, residual, norm, 1e-6), weights[2], None, workspace, g)
        residual.add_(small_m_linear(silu_mul(gate_up), weights[3], None, workspace, d))

    return graph_seconds([functools.partial(fused if is_fused else plain, weights) for weights in layers])


def main() -> None:
    options = gemm_options(__doc__, ROWS)
    read = read_bandwidth()
    workspace = SmallMWorkspace(torch.device("cuda"), 1 << 24)
    for name, (n, k) in SHAPES.items():
        if options.only in name:
            (sweep_shape if options.sweep else chosen_shape)(name, n, k, options.rows, read, workspace)
    for name, sizes in LAYERS.items():
        if options.only in name:
            fused, plain = layer_seconds(*sizes, is_fused=True), layer_seconds(*sizes, is_fused=False)
            report("gemv layer", name, fused_us=fused * 1e6, plain_us=plain * 1e6, plain_ratio=plain / fused)


if __name__ == "__main__":
    main()
