"""A layer of experts: routing, sorting and the two grouped GEMMs, beside the time to read the chosen experts once.

    python -m benchmarks.kernels.bench_experts [--shape qwen3-30b-a3b] [--tokens 1,8,64,256] [--sweep]

Each call has random choices of its own, so that weights come from memory. `--sweep` tries settings for each GEMM and
prints the best few for each number of tokens, to become rules of `kernels.gpu.tuning`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.timing import compile_ahead, graph_seconds, read_bandwidth, report
from kernels.gpu.grouped_gemm import MAX_UNSORTED, SortedPairs, grouped_gemm, sort_pairs
from kernels.gpu.grouped_gemv import add_down_of_row, grouped_gemv
from kernels.gpu.moe_routing import route
from kernels.gpu.tuning import (
    DOWN_PAIRS,
    DOWN_ROW,
    GATE_UP_PAIRS,
    GATE_UP_ROW,
    GROUPED_DOWN,
    GROUPED_GATE_UP,
    MAX_PAIRS,
    GemvConfig,
    TileConfig,
)

NUM_CHOICES = 24  # sets of chosen experts that calls rotate through
DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
NUM_SHOWN = 4  # settings of a sweep
SWEEP_ROWS = [
    GemvConfig(n, k, w, s)
    for (n, k, w), s in product(
        ((2, 256, 2), (2, 512, 2), (4, 256, 2), (4, 256, 4), (8, 256, 4), (8, 256, 8), (4, 512, 4)), (1, 3, 5)
    )
]
SWEEP_TILES = [
    TileConfig(n, k, 1, warps, stages, m)
    for (n, k, warps), stages, m in product(
        (
            (32, 128, 4),
            (32, 256, 4),
            (64, 256, 4),
            (64, 128, 4),
            (64, 64, 4),
            (128, 64, 4),
            (128, 64, 8),
            (128, 128, 8),
        ),
        (3, 4, 5),
        (16, 32, 64, 128),
    )
    if (n + m) * k * stages <= 220 << 10 and (m > 16 or n < 128)
]


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    num_experts: int
    top_k: int


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "deepseek-v2-lite": Shape(2048, 1408, 64, 6),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
}


class Layer:
    """Weights, and inputs for so many tokens."""

    def __init__(
        self, shape: Shape, num_tokens: int, gate_up: Tensor, down: Tensor, num_choices: int = NUM_CHOICES
    ) -> None:
        self.shape, self.gate_up, self.down = shape, gate_up, down
        self.scales = None, None
        if gate_up.itemsize == 1:
            self.scales = torch.ones(gate_up.shape[:2], device="cuda"), torch.ones(down.shape[:2], device="cuda")
        self.x = torch.randn(num_tokens, shape.hidden, device="cuda").bfloat16()
        self.inside = torch.randn(num_tokens * shape.top_k, shape.inner, device="cuda").bfloat16()
        self.logits = [
            torch.randn(num_tokens, shape.num_experts, device="cuda").bfloat16() for _ in range(num_choices)
        ]
        self.routes = [route(logits, shape.top_k) for logits in self.logits]
        self.pairs = [sort_pairs(chosen, shape.num_experts) for _, chosen in self.routes]

    def floor_seconds(self, bandwidth: float) -> float:
        """To read the experts that were chosen, once."""
        used = sum(int((pairs.counts > 0).sum()) for pairs in self.pairs) / NUM_CHOICES
        return used * 3 * self.shape.hidden * self.shape.inner * self.down.itemsize / bandwidth

    def gemv(self, index: int, config: GemvConfig, is_gate_up: bool) -> None:
        (shares, chosen), top_k = self.routes[index], self.shape.top_k
        if is_gate_up:
            grouped_gemv(self.x, self.gate_up, chosen, config, top_k, scales=self.scales[0])
        else:
            grouped_gemv(self.inside, self.down, chosen, config, top_k, shares, scales=self.scales[1])

    def row(self, index: int, config: GemvConfig, is_gate_up: bool) -> None:
        (shares, chosen), top_k = self.routes[index], self.shape.top_k
        if is_gate_up:
            grouped_gemv(
                self.x, self.gate_up, chosen, config, top_k, norm=self.x[0], eps=1e-6, scales=self.scales[0]
            )  # fmt: skip
        else:
            add_down_of_row(self.inside, self.down, chosen, shares, config, self.x, self.scales[1])

    def both_of_row(self, index: int) -> None:
        gate_up = GATE_UP_ROW.find(itemsize=self.gate_up.itemsize)
        assert gate_up is not None, "the last rule has no bounds"
        self.row(index, gate_up, True)
        self.row(index, DOWN_ROW, False)

    def gemm(self, index: int, config: TileConfig, is_gate_up: bool) -> None:
        (shares, chosen), top_k = self.routes[index], self.shape.top_k
        pairs = self.pairs[index] if chosen.shape[0] > MAX_UNSORTED else chosen
        if is_gate_up:
            grouped_gemm(self.x, self.gate_up, pairs, config, top_k, scales=self.scales[0])
        else:
            grouped_gemm(self.inside, self.down, pairs, config, top_k, shares, self.scales[1])

    def route(self, index: int) -> None:
        route(self.logits[index], self.shape.top_k)

    def sort(self, index: int) -> SortedPairs:
        return sort_pairs(self.routes[index][1], self.shape.num_experts)


def seconds(call: Callable[[int], object]) -> float:
    return graph_seconds([functools.partial(call, index) for index in range(NUM_CHOICES)])


def sweep(configs: Sequence[object], call: Callable[[int, object], object]) -> str:
    """The fastest of the settings that fit the chip, with their microseconds."""
    found: list[tuple[float, str]] = []
    for config in configs:
        try:
            time = seconds(lambda index, config=config: call(index, config))  # type: ignore[misc]
        except OutOfResources:
            continue
        fields = [str(value) for value in vars_of(config).values()]
        found.append((time, f"{time * 1e6:.1f} ({', '.join(fields)})"))
    return "; ".join(text for _, text in sorted(found)[:NUM_SHOWN])


def vars_of(config: object) -> dict[str, int]:
    return {name: getattr(config, name) for name in config.__slots__}  # type: ignore[attr-defined]


def compile_some(
    shape: Shape, num_tokens: int, dtype: torch.dtype, configs: Sequence[GemvConfig | TileConfig]
) -> None:
    """Put kernels into Triton's cache on disk, for the process that measures."""
    sizes = (shape.num_experts, 2 * shape.inner, shape.hidden), (shape.num_experts, shape.hidden, shape.inner)
    layer = Layer(shape, num_tokens, *(torch.zeros(size, device="cuda", dtype=dtype) for size in sizes), 1)
    for config, is_gate_up in product(configs, (True, False)):
        try:
            if isinstance(config, GemvConfig):
                layer.gemv(0, config, is_gate_up)
                Layer(shape, 1, layer.gate_up, layer.down, 1).row(0, config, is_gate_up)
            else:
                layer.gemm(0, config, is_gate_up)
        except OutOfResources:
            pass


def tiles_for(num_tokens: int) -> list[TileConfig]:
    """No tile is larger than the tokens, of which few share an expert."""
    return [config for config in SWEEP_TILES if config.block_m <= max(16, num_tokens // 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,1024,8192")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES), help="of the weights")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    shape, counts = SHAPES[options.shape], [int(count) for count in options.tokens.split(",")]
    dtype = DTYPES[options.dtype]
    if options.sweep:
        everything: list[GemvConfig | TileConfig] = [*SWEEP_ROWS, *tiles_for(max(counts))]
        compile_ahead(functools.partial(compile_some, shape, min(256, max(counts)), dtype), everything)
    bandwidth = read_bandwidth()
    sizes = (shape.num_experts, 2 * shape.inner, shape.hidden), (shape.num_experts, shape.hidden, shape.inner)
    gate_up, down = (torch.randn(size, device="cuda", dtype=torch.bfloat16) * size[-1] ** -0.5 for size in sizes)
    gate_up, down = gate_up.to(dtype), down.to(dtype)
    for num_tokens in counts:
        layer = Layer(shape, num_tokens, gate_up, down)
        floor = layer.floor_seconds(bandwidth)
        figures: dict[str, float | str] = {"floor_us": floor * 1e6, "route_us": seconds(layer.route) * 1e6}
        figures["sort_us"] = seconds(layer.sort) * 1e6
        num_pairs = num_tokens * shape.top_k
        for is_gate_up, name in ((True, "gate_up"), (False, "down")):
            load = num_pairs / shape.num_experts
            tile = (GROUPED_GATE_UP if is_gate_up else GROUPED_DOWN).find(
                pairs_per_expert=load, itemsize=dtype.itemsize
            )
            pair = GATE_UP_PAIRS if is_gate_up else DOWN_PAIRS
            row = GATE_UP_ROW.find(itemsize=dtype.itemsize) if is_gate_up else DOWN_ROW
            assert tile is not None, "the table has a rule for any number"
            of_row = functools.partial(layer.row, is_gate_up=is_gate_up)
            of_pairs = functools.partial(layer.gemv, is_gate_up=is_gate_up)
            of_tiles = functools.partial(layer.gemm, is_gate_up=is_gate_up)
            if num_tokens == 1:
                figures[f"{name}_row_us"] = seconds(functools.partial(of_row, config=row)) * 1e6
            if num_pairs <= MAX_PAIRS:
                figures[f"{name}_pairs_us"] = seconds(functools.partial(of_pairs, config=pair)) * 1e6
            figures[f"{name}_us"] = seconds(functools.partial(of_tiles, config=tile)) * 1e6
            if options.sweep:
                if num_tokens == 1:
                    figures[f"{name}_rows"] = sweep(SWEEP_ROWS, of_row)
                if num_pairs <= 2 * MAX_PAIRS:
                    figures[f"{name}_pairs"] = sweep(SWEEP_ROWS, of_pairs)
                figures[f"{name}_tiles"] = sweep(tiles_for(num_tokens), of_tiles)
        if num_tokens == 1:
            figures["both_of_row_us"] = seconds(layer.both_of_row) * 1e6
        report("experts", f"{options.shape} {num_tokens} tokens", **figures)


if __name__ == "__main__":
    main()
