"""One row through the GEMMs of a decoder layer: norms, gate and residuals fused into `gemv`, or separate."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.kernels.timing import graph_seconds, num_input_sets, report
from kernels.gpu.elementwise.rms_norm import add_rms_norm, rms_norm
from kernels.gpu.elementwise.silu_mul import silu_mul
from kernels.gpu.few_rows.few_row_tuning import FUSED_GEMV, GEMV
from kernels.gpu.few_rows.gemv import gemv
from kernels.gpu.tuning import found

LAYERS = {"qwen2.5-7b": (3584, 3584, 18944, 4608), "qwen3-0.6b": (1024, 2048, 3072, 4096)}


def layer_seconds(hidden: int, heads: int, inner: int, qkv: int, is_fused: bool) -> float:
    """Time one row through the four GEMMs of a decoder layer with their norms, activation and additions."""
    count = num_input_sets(2 * hidden * (qkv + heads + 3 * inner), 24)
    shapes = [(qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]
    layers = [[torch.randn(n, k, device="cuda").bfloat16() * k**-0.5 for n, k in shapes] for _ in range(count)]
    residual, attended = (torch.randn(1, n, device="cuda").bfloat16() for n in (hidden, heads))
    norm = torch.ones(hidden, device="cuda").bfloat16()
    of_shapes = [found(FUSED_GEMV.find(1, *shape)) for shape in shapes]
    q, o, g, d = (GEMV.find(1, *shape) or fused for shape, fused in zip(shapes, of_shapes, strict=True))

    def fused(weights: list[Tensor]) -> None:
        gemv(residual, weights[0], None, of_shapes[0], norm, 1e-6)
        gemv(attended, weights[1], None, o, added_to=residual)
        inner_row = gemv(residual, weights[2], None, of_shapes[2], norm, 1e-6, is_gated=True)
        gemv(inner_row, weights[3], None, d, added_to=residual)

    def plain(weights: list[Tensor]) -> None:
        gemv(rms_norm(residual, norm, 1e-6), weights[0], None, q)
        out = gemv(attended, weights[1], None, o)
        gate_up = gemv(add_rms_norm(out, residual, norm, 1e-6), weights[2], None, g)
        residual.add_(gemv(silu_mul(gate_up), weights[3], None, d))

    return graph_seconds([functools.partial(fused if is_fused else plain, weights) for weights in layers])


def main() -> None:
    for name, sizes in LAYERS.items():
        fused, plain = layer_seconds(*sizes, is_fused=True), layer_seconds(*sizes, is_fused=False)
        report("gemv layer", name, fused_us=fused * 1e6, plain_us=plain * 1e6, plain_ratio=plain / fused)


if __name__ == "__main__":
    main()
