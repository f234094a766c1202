"""A layer of experts: routing, sorting and the two grouped GEMMs, beside the time to read the chosen experts once.

    python -m benchmarks.kernels.bench_experts [--shape qwen3-30b-a3b] [--dtype int4] [--tokens 1,8,64,256] [--sweep]

Each call has random choices of its own, so that weights come from memory. `--sweep` tries settings for each GEMM and
prints the best few for each number of tokens, to become rules of `kernels.gpu.moe.expert_tuning`. `--dtype`: as in
`kernels/gpu/moe/expert_formats.py`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import astuple
from itertools import product
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.expert_weights import MAKERS, SHAPES, Shape, Weights, weights_of
from benchmarks.kernels.timing import compile_ahead, graph_seconds, read_bandwidth, report, sweep
from kernels.gpu.few_rows.gemm_configs import GemvConfig, TileConfig
from kernels.gpu.moe.expert_formats import columns_of
from kernels.gpu.moe.expert_pairs import SortedPairs, sort_pairs
from kernels.gpu.moe.expert_tuning import (
    DOWN_PAIRS,
    DOWN_ROW,
    GATE_UP_PAIRS,
    GATE_UP_ROW,
    GROUPED_DOWN,
    GROUPED_GATE_UP,
    MAX_PAIRS,
    ExpertTile,
)
from kernels.gpu.moe.grouped_gemm import MAX_UNSORTED, grouped_gemm
from kernels.gpu.moe.grouped_gemv import add_down_of_row, grouped_gemv
from kernels.gpu.moe.moe_routing import route
from kernels.gpu.moe.packed_experts import packed_experts, takes_packed, tile_of
from kernels.gpu.tuning import Table, found
from kernels.quantization.w4a16_gemm import MAX_CHUNK

NUM_CHOICES = 24  # sets of chosen experts, through which calls rotate
NUM_SHOWN = 4  # settings of a sweep
SWEEP_ROWS = [
    GemvConfig(n, k, w, s)
    for (n, k, w), s in product(
        ((2, 256, 2), (2, 512, 2), (4, 256, 2), (4, 256, 4), (8, 256, 4), (8, 256, 8), (4, 512, 4)), (1, 3, 5)
    )
]
SWEEP_PACKED_ROWS = [
    GemvConfig(n, k, w, s)
    for (n, k, w), s in product(
        ((16, 128, 1), (16, 256, 2), (16, 512, 4), (16, 1024, 8), (32, 256, 2), (32, 512, 4), (64, 512, 4)), (2, 3, 5)
    )
]
SWEEP_TILES = [
    TileConfig(n, k, 1, warps, stages, m)
    for (n, k, warps), stages, m in product(
        (
            (32, 128, 1),
            (32, 256, 2),
            (64, 128, 2),
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
        (8, 16, 32, 64, 128),
    )
    if (n + m) * k * stages <= 220 << 10 and (m > 16 or n < 128)
]

SWEEP_PACKED_TILES = [
    ExpertTile(*option)
    for option in (
        (8, 128, 4, 3), (8, 128, 4, 2), (16, 128, 4, 3), (16, 128, 4, 2), (16, 64, 4, 3), (32, 128, 4, 2),
        (32, 128, 8, 2), (64, 128, 4, 2), (64, 128, 8, 2), (64, 256, 8, 1), (128, 128, 8, 1),
        (128, 256, 8, 1), (256, 128, 8, 1),
    )
]  # fmt: skip


class Layer:
    """Weights, and inputs for `num_tokens` tokens."""

    def __init__(
        self, shape: Shape, num_tokens: int, gate_up: Weights, down: Weights, num_choices: int = NUM_CHOICES
    ) -> None:
        self.shape, self.gate_up, self.down = shape, gate_up, down
        device = down.weight.device
        self.x = torch.randn(num_tokens, shape.hidden, device=device).bfloat16()
        self.inside = torch.randn(num_tokens * shape.top_k, columns_of(down.weight), device=device).bfloat16()
        self.logits = [
            torch.randn(num_tokens, shape.num_experts, device=device).bfloat16() for _ in range(num_choices)
        ]
        self.routes = [route(logits, shape.top_k) for logits in self.logits]
        self.pairs = [sort_pairs(chosen, shape.num_experts) for _, chosen in self.routes]

    @property
    def is_listed(self) -> bool:
        return self.x.shape[0] > MAX_UNSORTED or takes_packed(self.x, self.gate_up.weight, self.gate_up.scales)

    def floor_seconds(self, bandwidth: float) -> float:
        """Return the time to read the chosen experts once."""
        used = sum(int((pairs.counts > 0).sum()) for pairs in self.pairs) / NUM_CHOICES
        return used / self.shape.num_experts * (self.gate_up.num_bytes + self.down.num_bytes) / bandwidth

    def gemv(self, index: int, config: GemvConfig, is_gate_up: bool) -> None:
        (shares, chosen), top_k = self.routes[index], self.shape.top_k
        if is_gate_up:
            grouped_gemv(self.x, self.gate_up.weight, chosen, config, top_k, scales=self.gate_up.scales)
        else:
            grouped_gemv(self.inside, self.down.weight, chosen, config, top_k, shares, scales=self.down.scales)

    def row(self, index: int, config: GemvConfig, is_gate_up: bool) -> None:
        (shares, chosen), top_k = self.routes[index], self.shape.top_k
        if is_gate_up:
            grouped_gemv(
                self.x, self.gate_up.weight, chosen, config, top_k, norm=self.x[0], eps=1e-6,
                scales=self.gate_up.scales,
            )  # fmt: skip
        else:
            add_down_of_row(self.inside, self.down.weight, chosen, shares, config, self.x, self.down.scales)

    def both_of_row(self, index: int) -> None:
        self.row(index, self.setting(GATE_UP_ROW, True), True)
        self.row(index, self.setting(DOWN_ROW, False), False)

    def setting(self, table: Table[GemvConfig], is_gate_up: bool) -> GemvConfig:
        weights = self.gate_up if is_gate_up else self.down
        return found(table.find(itemsize=weights.itemsize, columns=columns_of(weights.weight)))

    def gemm(self, index: int, config: TileConfig | ExpertTile, is_gate_up: bool) -> None:
        (shares, chosen), top_k = self.routes[index], self.shape.top_k
        if isinstance(config, ExpertTile):
            weights, x = (self.gate_up, self.x) if is_gate_up else (self.down, self.inside)
            assert weights.scales is not None, "they have 4 bits"
            packed_experts(
                x, weights.weight, self.pairs[index], config, top_k, None if is_gate_up else shares, weights.scales,
                None,
            )  # fmt: skip
            return
        pairs = self.pairs[index] if self.is_listed else chosen
        if is_gate_up:
            grouped_gemm(self.x, self.gate_up.weight, pairs, config, top_k, scales=self.gate_up.scales)
        else:
            grouped_gemm(self.inside, self.down.weight, pairs, config, top_k, shares, self.down.scales)

    def tile(self, is_gate_up: bool) -> TileConfig | ExpertTile:
        """Return the tables' setting."""
        load = self.x.shape[0] * self.shape.top_k / self.shape.num_experts
        weights, x = (self.gate_up, self.x) if is_gate_up else (self.down, self.inside)
        if self.is_listed and weights.scales is not None and takes_packed(x, weights.weight, weights.scales):
            packed = tile_of(weights.weight, weights.scales, is_gate_up, load)
            if packed is not None:
                return packed
        table, columns = GROUPED_GATE_UP if is_gate_up else GROUPED_DOWN, columns_of(weights.weight)
        return found(table.find(pairs_per_expert=load, itemsize=weights.itemsize, columns=columns))

    def route(self, index: int) -> None:
        route(self.logits[index], self.shape.top_k)

    def sort(self, index: int) -> SortedPairs:
        return sort_pairs(self.routes[index][1], self.shape.num_experts)


def seconds(call: Callable[[int], object]) -> float:
    return graph_seconds([functools.partial(call, index) for index in range(NUM_CHOICES)])


def fastest(configs: Sequence[Any], call: Callable[[int, Any], object]) -> str:
    """Return the fastest settings that fit the chip, with their microseconds."""
    swept = sweep(configs, lambda config: seconds(lambda index: call(index, config)))
    return "; ".join(f"{time * 1e6:.1f} {astuple(config)}" for time, config in swept[:NUM_SHOWN])


def compile_some(
    shape: Shape, counts: Sequence[int], dtype: str, group: int,
    configs: Sequence[GemvConfig | TileConfig | ExpertTile],
) -> None:  # fmt: skip
    """Compile kernels into Triton's disk cache, for the measuring process."""
    weights = weights_of(dtype, shape, group)
    row, *layers = [Layer(shape, count, *weights, 1) for count in (1, *counts)]
    for config, is_gate_up, layer in product(configs, (True, False), layers):
        try:
            if isinstance(config, GemvConfig):
                layer.gemv(0, config, is_gate_up)
                row.row(0, config, is_gate_up)
            elif isinstance(config, TileConfig) or layer.is_listed:
                layer.gemm(0, config, is_gate_up)
        except OutOfResources:
            pass


def tiles_for(num_tokens: int, is_packed: bool) -> list[TileConfig | ExpertTile]:
    """Return tiles no larger than the tokens, since few of these share an expert; packed weights come in chunks."""
    tiles: list[TileConfig | ExpertTile] = [
        config for config in SWEEP_TILES if config.block_k >= MAX_CHUNK or not is_packed
    ]
    tiles += SWEEP_PACKED_TILES if is_packed else []
    return [config for config in tiles if config.block_m <= max(16, num_tokens // 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,1024,8192")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(MAKERS), help="of the weights")
    parser.add_argument("--group", type=int, default=128, help="columns that share a scale of int4 weights")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    shape, counts = SHAPES[options.shape], [int(count) for count in options.tokens.split(",")]
    is_packed = options.dtype in ("int4", "mxfp4")
    rows = SWEEP_PACKED_ROWS if is_packed else SWEEP_ROWS
    if options.sweep:
        everything: list[GemvConfig | TileConfig | ExpertTile] = [*rows, *tiles_for(max(counts), is_packed)]
        sizes = 8, MAX_UNSORTED, min(256, max(counts))  # tiles for that many tokens, or sorted pairs
        kinds = {next((size for size in sizes[:2] if count <= size), sizes[2]) for count in counts}
        compile_ahead(functools.partial(compile_some, shape, sorted(kinds), options.dtype, options.group), everything)
    bandwidth = read_bandwidth()
    weights = weights_of(options.dtype, shape, options.group)
    for num_tokens in counts:
        layer, tiles = Layer(shape, num_tokens, *weights), tiles_for(num_tokens, is_packed)
        figures = figures_of(layer, bandwidth, rows if options.sweep else [], tiles)
        report("experts", f"{options.shape} {options.dtype} {num_tokens} tokens", **figures)


def figures_of(
    layer: Layer, bandwidth: float, rows: Sequence[GemvConfig], tiles: Sequence[TileConfig | ExpertTile]
) -> dict[str, float | str]:
    """Return microseconds of each kernel with the tables' settings. rows, tiles: settings to sweep, if any."""
    num_tokens, num_pairs = layer.x.shape[0], layer.x.shape[0] * layer.shape.top_k
    figures: dict[str, float | str] = {
        "floor_us": layer.floor_seconds(bandwidth) * 1e6,
        "route_us": seconds(layer.route) * 1e6,
        "sort_us": seconds(layer.sort) * 1e6,
    }
    for is_gate_up, name, row, pair in (
        (True, "gate_up", GATE_UP_ROW, GATE_UP_PAIRS),
        (False, "down", DOWN_ROW, DOWN_PAIRS),
    ):
        itemsize = layer.down.itemsize
        of_row = functools.partial(layer.row, is_gate_up=is_gate_up)
        of_pairs = functools.partial(layer.gemv, is_gate_up=is_gate_up)
        of_tiles = functools.partial(layer.gemm, is_gate_up=is_gate_up)
        if num_tokens == 1:
            config = layer.setting(row, is_gate_up)
            figures[f"{name}_row_us"] = seconds(functools.partial(of_row, config=config)) * 1e6
        max_pairs, _ = found(MAX_PAIRS.find(itemsize=itemsize))
        if num_pairs <= max_pairs:
            config = layer.setting(pair, is_gate_up)
            figures[f"{name}_pairs_us"] = seconds(functools.partial(of_pairs, config=config)) * 1e6
        of_load = functools.partial(of_tiles, config=layer.tile(is_gate_up))
        figures[f"{name}_us"] = seconds(of_load) * 1e6
        if rows:
            if num_tokens == 1:
                figures[f"{name}_rows"] = fastest(rows, of_row)
            if num_pairs <= 2 * max_pairs:
                figures[f"{name}_pairs"] = fastest(rows, of_pairs)
            figures[f"{name}_tiles"] = fastest(tiles, of_tiles)
    if num_tokens == 1:
        figures["both_of_row_us"] = seconds(layer.both_of_row) * 1e6
    return figures


if __name__ == "__main__":
    main()
