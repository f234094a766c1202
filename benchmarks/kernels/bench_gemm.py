"""GEMMs as a step runs them against cuBLAS in bfloat16: read bandwidth of the weight, from one row to many.

    python -m benchmarks.kernels.bench_gemm --kind plain [--rows 1 8] [--only "0.6b o"] [--sweep]

Quantization of x is part of the time. `--sweep` tries settings of the kernels, x being quantized beforehand;
`kernels/gpu/few_rows/few_row_tuning.py` and `kernels/gpu/quantization/quantized_tuning.py` come from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from triton.runtime.errors import TritonError

from benchmarks.kernels import gemm_settings
from benchmarks.kernels.timing import graph_seconds, num_input_sets, read_bandwidth, report
from engine.few_rows import split_k
from engine.gpu.ops import plain
from engine.layers.linear import Linear
from engine.quantization.gpu_linears import (
    FP8,
    W8A8,
    W8A16,
    EightBit,
    PackedGemm,
    packed_layer,
    packed_of,
    scales_of,
    w4a16_layer,
)
from kernels.gpu.elementwise.silu_mul import silu_mul
from kernels.gpu.few_rows.gemv import gemv
from kernels.gpu.few_rows.skinny_gemm import skinny_gemm
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.launch import has_wgmma
from kernels.gpu.quantization.packed_gemm import packed_gemm
from kernels.gpu.quantization.packed_rows import MAX_ROWS as MAX_PACKED_ROWS
from kernels.gpu.quantization.packed_rows import packed_rows_gemm
from kernels.gpu.quantization.packed_stream import MAX_ROWS as MAX_STREAM_ROWS
from kernels.gpu.quantization.packed_stream import packed_stream
from kernels.gpu.quantization.quantize import quantize_rows
from kernels.gpu.quantization.sliced_k_gemm import MAX_ROWS, sliced_k_gemm
from kernels.quantization.packed_weights import PACKINGS, PackedWeight, of_w4, pack_weight
from kernels.quantization.w4a16_gemm import pack_w4

DEVICE = "cuda"
SHAPES = {
    "qwen2.5-7b qkv": (4608, 3584), "qwen2.5-7b o": (3584, 3584), "qwen2.5-7b gate_up": (37888, 3584),
    "qwen2.5-7b down": (3584, 18944), "qwen2.5-7b lm_head": (152064, 3584), "qwen2.5-7b/2 qkv": (2304, 3584),
    "qwen2.5-7b/2 o": (3584, 1792), "qwen2.5-7b/2 gate_up": (18944, 3584), "qwen2.5-7b/2 down": (3584, 9472),
    "70b/2 qkv": (5120, 8192), "70b/2 o": (8192, 4096), "70b/2 gate_up": (28672, 8192), "70b/2 down": (8192, 14336),
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096), "llama3.1-8b gate_up": (28672, 4096), "llama3.1-8b down": (4096, 14336),
    "qwen3-8b gate_up": (24576, 4096), "qwen3-8b down": (4096, 12288), "qwen3-1.7b qkv": (4096, 2048),
    "qwen3-1.7b down": (2048, 6144), "qwen3-0.6b qkv": (4096, 1024), "qwen3-0.6b o": (1024, 2048),
    "qwen3-0.6b gate_up": (6144, 1024), "qwen3-0.6b down": (1024, 3072), "qwen3-0.6b lm_head": (151936, 1024),
}  # fmt: skip
ROWS = (1, 8, 32, 64, 256, 2048)
Layer = Any  # of the kind
Setting = tuple[object, Callable[[Layer], object]]


@dataclass(frozen=True)
class Kind:
    """make: makes a layer of a weight. served: returns what a step calls for x with that many rows, None if it uses
    another kind. library: torch's own GEMM of the kind, from x and layer. settings: settings of a sweep for x.
    """

    make: Callable[[Tensor, SplitKWorkspace], Layer]
    served: Callable[[Layer, int, SplitKWorkspace], Callable[[Tensor], object] | None]
    num_bytes: Callable[[Layer], int]
    library: Callable[[Tensor, Layer], object] | None = None
    settings: Callable[[Tensor, SplitKWorkspace], Iterator[Setting]] | None = None


def linear(weight: Tensor, _: SplitKWorkspace) -> Linear:
    return Linear(weight)


def as_it_is(layer: Layer, _: int, __: SplitKWorkspace) -> Callable[[Tensor], object]:
    call: Callable[[Tensor], object] = layer
    return call


def preloaded(layer: Linear, num_rows: int, _: SplitKWorkspace) -> Callable[[Tensor], object] | None:
    return None if split_k.config_of(layer, num_rows) is None else split_k.gemm(layer, num_rows)


def each_of(configs: Iterable[Any], call: Callable[[Any, Layer], object]) -> Iterator[Setting]:
    return ((config, partial(call, config)) for config in configs)


def plain_settings(x: Tensor, workspace: SplitKWorkspace) -> Iterator[Setting]:
    if x.shape[0] == 1:
        yield from each_of(gemm_settings.GEMVS, lambda config, layer: gemv(x, layer.weight, None, config))
    yield from each_of(
        gemm_settings.TILES, lambda config, layer: skinny_gemm(x, layer.weight, None, workspace, config)
    )


def settings_8_bit(kind: EightBit, x: Tensor, workspace: SplitKWorkspace) -> Iterator[Setting]:
    values, scales = quantize_rows(x, kind.dtype, kind.num_planes)
    if values.shape[0] <= MAX_ROWS:
        yield from each_of(
            gemm_settings.SLICED_K,
            lambda config, layer: sliced_k_gemm(values, scales, layer.weight, layer.scales, None, x.dtype, config),
        )
    yield from each_of(
        gemm_settings.TILES_8_BIT if values.shape[0] <= 64 else gemm_settings.TILES_8_BIT_MANY_ROWS,
        lambda config, layer: skinny_gemm(
            values, layer.weight, None, workspace, config, scales, layer.scales, x.dtype
        ),
    )


def packed_settings(x: Tensor, workspace: SplitKWorkspace) -> Iterator[Setting]:
    if x.shape[0] <= MAX_PACKED_ROWS:
        yield from each_of(
            gemm_settings.PACKED_ROWS,
            lambda config, layer: packed_rows_gemm(x, packed_weight_of(layer), None, config),
        )
    if has_wgmma(x) and x.shape[0] <= MAX_STREAM_ROWS:
        yield from each_of(
            gemm_settings.PACKED_STREAMS,
            lambda config, layer: packed_stream(x, packed_weight_of(layer), None, workspace, config),
        )
    else:
        yield from each_of(
            [tile for tile in gemm_settings.PACKED_TILES if tile.block_m <= max(16, x.shape[0])],
            lambda config, layer: packed_gemm(x, packed_weight_of(layer), None, workspace, config),
        )


def packed_weight_of(layer: Linear) -> PackedWeight:
    return layer.gemm.packed if isinstance(layer.gemm, PackedGemm) else of_w4(packed_of(layer))


def random_layer(bits: int, group: int, weight: Tensor, workspace: SplitKWorkspace) -> Linear:
    n, k = weight.shape
    values = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=weight.device)
    scales, zeros = (torch.rand(n, k // group, device=weight.device) for _ in range(2))
    if bits == 4:
        return w4a16_layer(pack_w4(values, scales, zeros), None, workspace)
    return packed_layer(
        pack_weight(values, scales, None if PACKINGS[bits].is_symmetric else zeros, bits), None, workspace
    )


def scaled_mm(x: Tensor, layer: Linear) -> Tensor:
    values, scales = quantize_rows(x, layer.weight.dtype)
    return torch._scaled_mm(
        values, layer.weight.t(), scales[:, None], scales_of(layer)[None, :], out_dtype=x.dtype, use_fast_accum=True
    )


def int_mm(x: Tensor, layer: Linear) -> Tensor:
    values, scales = quantize_rows(x, layer.weight.dtype)
    return (torch._int_mm(values, layer.weight.t()) * (scales[:, None] * scales_of(layer))).to(x.dtype)


def kind_8_bit(kind: EightBit, library: Callable[[Tensor, Any], object] | None = None) -> Kind:
    return Kind(
        lambda weight, workspace: kind.of(Linear(weight), workspace), as_it_is, lambda layer: layer.weight.nbytes,
        library, partial(settings_8_bit, kind),
    )  # fmt: skip


def kind_packed(bits: int, group: int = 0) -> Kind:
    """group: columns that share a scale, for 4 bits."""

    def num_bytes(layer: Linear) -> int:
        packed = packed_weight_of(layer)
        return sum(each.nbytes for each in (packed.words, packed.high, packed.pairs) if each is not None)

    make = partial(random_layer, bits, group or PACKINGS[bits].group)
    return Kind(make, as_it_is, num_bytes, None, packed_settings)


KINDS = {
    "plain": Kind(linear, plain.gemm, lambda layer: layer.weight.nbytes, settings=plain_settings),
    "gated": Kind(
        linear, plain.gated_gemm, lambda layer: layer.weight.nbytes, lambda x, layer: silu_mul(layer(x))
    ),
    "preloaded": Kind(linear, preloaded, lambda layer: layer.weight.nbytes),
    "fp8": kind_8_bit(FP8, scaled_mm),
    "w8a8": kind_8_bit(W8A8, int_mm),
    "w8a16": kind_8_bit(W8A16),
    "w4": kind_packed(4, 128),
    "w4-32": kind_packed(4, 32),
    **{f"packed-{bits}": kind_packed(bits) for bits in (2, 3, 5, 6)},
}  # fmt: skip


def table(
    name: str, kind: Kind, shape: str, weights: Sequence[Tensor], layers: Sequence[Layer], rows: Sequence[int],
    read: float, workspace: SplitKWorkspace,
) -> None:  # fmt: skip
    """Report what a step runs, compared with bfloat16 in cuBLAS and with torch's own GEMM of the kind."""
    n, k = weights[0].shape
    for num_rows in rows:
        x = torch.randn(num_rows, k, device=DEVICE).bfloat16()
        served = [kind.served(layer, num_rows, workspace) for layer in layers]
        calls = [partial(call, x) for call in served if call is not None]
        if not calls:
            continue
        seconds = graph_seconds(calls)
        cublas = graph_seconds([partial(functional.linear, x, weight) for weight in weights])
        own = graph_seconds([partial(plain.gemm(Linear(weight), num_rows, workspace), x) for weight in weights])
        figures = {"cublas_ratio": cublas / seconds, "own_bf16_ratio": own / seconds}
        if kind.library is not None and num_rows > 16:
            figures["library_ratio"] = graph_seconds([partial(kind.library, x, layer) for layer in layers]) / seconds
        report(
            name, f"{shape} [{num_rows},{n},{k}]", us=seconds * 1e6,
            of_read=kind.num_bytes(layers[0]) / seconds / read, tflops=2 * num_rows * n * k / seconds / 1e12,
            **figures,
        )  # fmt: skip


def sweep(
    name: str, kind: Kind, shape: str, layers: Sequence[Layer], k: int, rows: Sequence[int], read: float,
    workspace: SplitKWorkspace,
) -> None:  # fmt: skip
    """Report the best settings for each number of rows."""
    assert kind.settings is not None, f"{name} has no settings to try"
    for num_rows in rows:
        x = torch.randn(num_rows, k, device=DEVICE).bfloat16()
        results: list[tuple[float, str]] = []
        for config, call in kind.settings(x, workspace):
            try:
                seconds = graph_seconds([partial(call, layer) for layer in layers], 5)
            except (RuntimeError, ValueError, TritonError) as error:  # tiles or partials too large
                report("skipped", str(config), why=str(error)[:80])
                continue
            results.append((seconds, f"{config} {seconds * 1e6:.2f}"))
        results.sort()
        report(
            f"{name} sweep", f"{shape}, {num_rows} rows", best=" | ".join(label for _, label in results[:3]),
            of_read=kind.num_bytes(layers[0]) / results[0][0] / read,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--only", default="", help="part of a shape's name")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    read = read_bandwidth()
    workspace = SplitKWorkspace(torch.device(DEVICE), 1 << 26)
    for name in options.kind:
        kind = KINDS[name]
        for shape, (n, k) in SHAPES.items():
            if options.only not in shape or (name == "gated" and "gate_up" not in shape):
                continue
            sets = num_input_sets(2 * n * k, 48)
            weights = [torch.randn(n, k, device=DEVICE).bfloat16() for _ in range(sets)]
            layers = [kind.make(weights[i % sets], workspace) for i in range(num_input_sets(n * k // 2, 48))]
            if options.sweep:
                sweep(name, kind, shape, layers, k, options.rows, read, workspace)
            else:
                table(name, kind, shape, weights, layers, options.rows, read, workspace)


if __name__ == "__main__":
    main()
