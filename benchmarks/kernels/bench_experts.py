"""A layer of experts: routing, sorting and the two grouped GEMMs, beside the time to read the chosen experts once.

    python -m benchmarks.kernels.bench_experts [--shape qwen3-30b-a3b] [--tokens 1,8,64,256] [--sweep]

Each call has random choices of its own, so that weights come from memory. `--sweep` tries settings and prints the
best for each number of tokens, to become rules of `kernels.gpu.tuning`.
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

from benchmarks.kernels.timing import graph_seconds, read_bandwidth, report
from kernels.gpu.grouped_gemm import SortedPairs, grouped_gemm, grouped_gemv, sort_pairs
from kernels.gpu.moe_routing import route_softmax
from kernels.gpu.tuning import GROUPED, PAIR, GemvConfig, TileConfig

NUM_CHOICES = 24  # sets of chosen experts that calls rotate through
SWEEP_ROWS = [GemvConfig(n, k, w, s) for (n, k, w), s in product(((4, 256, 2), (8, 256, 4), (4, 512, 4)), (1, 3, 5))]
SWEEP_TILES = [
    TileConfig(n, k, 1, warps, stages, m)
    for (n, k, warps), stages, m in product(
        ((64, 128, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8)), (3, 4), (16, 32, 64, 128)
    )
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
}


class Layer:
    """Weights, and inputs for so many tokens."""

    def __init__(self, shape: Shape, num_tokens: int, gate_up: Tensor, down: Tensor) -> None:
        self.shape, self.gate_up, self.down = shape, gate_up, down
        self.x = torch.randn(num_tokens, shape.hidden, device="cuda").bfloat16()
        self.inside = torch.randn(num_tokens * shape.top_k, shape.inner, device="cuda").bfloat16()
        self.logits = [
            torch.randn(num_tokens, shape.num_experts, device="cuda").bfloat16() for _ in range(NUM_CHOICES)
        ]
        self.routes = [route_softmax(logits, shape.top_k, True) for logits in self.logits]
        self.pairs = [sort_pairs(chosen, shape.num_experts) for _, chosen in self.routes]

    def floor_seconds(self, bandwidth: float) -> float:
        """To read the experts that were chosen, once."""
        used = sum(int((pairs.counts > 0).sum()) for pairs in self.pairs) / NUM_CHOICES
        return used * 3 * self.shape.hidden * self.shape.inner * 2 / bandwidth

    def gemv(self, index: int, config: GemvConfig) -> None:
        (shares, chosen), top_k = self.routes[index], self.shape.top_k
        grouped_gemv(self.x, self.gate_up, chosen, config, top_k)
        grouped_gemv(self.inside, self.down, chosen, config, top_k, shares)

    def gemm(self, index: int, config: TileConfig) -> None:
        (shares, _), pairs, top_k = self.routes[index], self.pairs[index], self.shape.top_k
        grouped_gemm(self.x, self.gate_up, pairs, config, top_k)
        grouped_gemm(self.inside, self.down, pairs, config, top_k, shares)

    def route(self, index: int) -> None:
        route_softmax(self.logits[index], self.shape.top_k, True)

    def sort(self, index: int) -> SortedPairs:
        return sort_pairs(self.routes[index][1], self.shape.num_experts)


def seconds(call: Callable[[int], object]) -> float:
    return graph_seconds([functools.partial(call, index) for index in range(NUM_CHOICES)])


def best(configs: Sequence[object], call: Callable[[int, object], object]) -> tuple[float, object]:
    """The fastest of the settings that fit the chip."""
    found: list[tuple[float, object]] = []
    for config in configs:
        try:
            time = seconds(lambda index, config=config: call(index, config))  # type: ignore[misc]
        except OutOfResources:
            continue
        found.append((time, config))
    return min(found, key=lambda item: item[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,1024,8192")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    shape, bandwidth = SHAPES[options.shape], read_bandwidth()
    sizes = (shape.num_experts, 2 * shape.inner, shape.hidden), (shape.num_experts, shape.hidden, shape.inner)
    gate_up, down = (torch.randn(size, device="cuda", dtype=torch.bfloat16) * size[-1] ** -0.5 for size in sizes)
    for num_tokens in map(int, options.tokens.split(",")):
        layer = Layer(shape, num_tokens, gate_up, down)
        floor = layer.floor_seconds(bandwidth)
        figures: dict[str, float | str] = {"floor_us": floor * 1e6, "route_us": seconds(layer.route) * 1e6}
        figures["sort_us"] = seconds(layer.sort) * 1e6
        num_pairs = num_tokens * shape.top_k
        row, tile = PAIR.find(pairs=num_pairs), GROUPED.find(pairs_per_expert=num_pairs / shape.num_experts)
        if row is not None or num_tokens <= 16:
            taken = row or GemvConfig(4, 256, num_warps=2, num_stages=4)
            figures["gemv_us"] = seconds(functools.partial(layer.gemv, config=taken)) * 1e6
        assert tile is not None, "the table has a rule for any number"
        figures["gemm_us"] = seconds(functools.partial(layer.gemm, config=tile)) * 1e6
        if options.sweep:
            if num_tokens <= 16:
                time, config = best(SWEEP_ROWS, layer.gemv)  # type: ignore[arg-type]
                figures |= {"best_gemv_us": time * 1e6, "best_gemv": str(config)}
            time, config = best(SWEEP_TILES, layer.gemm)  # type: ignore[arg-type]
            figures |= {"best_gemm_us": time * 1e6, "best_gemm": str(config)}
        report("experts", f"{options.shape} {num_tokens} tokens", **figures)


if __name__ == "__main__":
    main()
