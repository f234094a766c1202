"""paged_decode: read bandwidth of K and V, against the measured one and the kernel without splits.

`--sweep` tries tile sizes, warps, stages and splits; the defaults in `paged_decode` come from it.
"""

from __future__ import annotations

import argparse
import functools

import torch
from torch import Tensor

from benchmarks.kernels.timing import graph_seconds, num_input_sets, read_bandwidth, report
from kernels.gpu.paged_decode import (
    DEFAULT_TUNING,
    MAX_SPLITS,
    DecodeTuning,
    DecodeWorkspace,
    num_splits,
    paged_decode,
    simple_decode,
)

HEAD_DIM = 128
SHAPES = [(1, 1024), (1, 4096), (1, 32768), (8, 1024), (8, 4096), (64, 1024), (64, 4096), (256, 1024)]
MODELS = {"qwen2.5-7b": (28, 4), "qwen3-0.6b": (16, 8), "llama3.1-8b": (32, 8)}


class Case:
    """Random inputs of one shape; the layers of one pool are the rotating input sets."""

    def __init__(self, num_heads: int, num_kv_heads: int, rows: int, length: int, block_size: int) -> None:
        self.bytes_per_call = 2 * 2 * rows * num_kv_heads * length * HEAD_DIM
        self.num_layers = num_input_sets(self.bytes_per_call, 48)
        blocks = rows * -(-length // block_size)
        self.pool = torch.empty(
            blocks, self.num_layers, 2, num_kv_heads, block_size, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
        ).normal_()
        self.q = torch.randn(rows, num_heads, HEAD_DIM, device="cuda").bfloat16()
        self.table = torch.randperm(blocks, device="cuda").view(rows, -1).int()
        self.lengths = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        self.workspace = DecodeWorkspace(rows, num_heads, num_kv_heads, HEAD_DIM, self.q.device)
        most = rows * num_heads * MAX_SPLITS
        self.workspace.outputs = torch.empty(most, HEAD_DIM, device="cuda")
        self.workspace.log_sums = torch.empty(most, device="cuda")

    def seconds(self, tuning: DecodeTuning = DEFAULT_TUNING, splits: int | None = None) -> float:
        return graph_seconds([functools.partial(self.run, layer, tuning, splits) for layer in range(self.num_layers)])

    def run(self, layer: int, tuning: DecodeTuning, splits: int | None) -> Tensor:
        return paged_decode(self.q, self.pool, layer, self.table, self.lengths, self.workspace, tuning, splits)

    def simple_seconds(self) -> float:
        return graph_seconds(
            [
                functools.partial(simple_decode, self.q, self.pool, layer, self.table, self.lengths)
                for layer in range(self.num_layers)
            ],
            3,
        )


def sweep(read: float) -> None:
    options = [(64, 4, 4), (64, 4, 5), (64, 4, 6), (32, 4, 5), (64, 2, 4), (64, 2, 5), (32, 2, 5)]
    for model, block_size in (("qwen2.5-7b", 64), ("qwen3-0.6b", 64)):
        for rows, length in SHAPES:
            case = Case(*MODELS[model], rows, length, block_size)
            base = num_splits(rows, MODELS[model][1], case.q.device)
            results = []
            for tile, num_warps, num_stages in options:
                for splits in sorted({min(base * f, MAX_SPLITS) for f in (1, 2)} | {max(base // 2, 1)}):
                    seconds = case.seconds(DecodeTuning(tile, num_warps, num_stages), splits)
                    results.append((seconds, f"tile{tile} w{num_warps} s{num_stages} x{splits}"))
            results.sort()
            best = " | ".join(f"{name} {seconds * 1e6:.1f}" for seconds, name in results[:4])
            rate = case.bytes_per_call / results[0][0]
            report(
                "paged_decode sweep", f"{model} bs{block_size} {rows}x{length}", best=best, of_read=rate / read,
                worst_us=results[-1][0] * 1e6,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--block-size", type=int, default=64)
    options = parser.parse_args()
    read = read_bandwidth()
    if options.sweep:
        sweep(read)
        return
    for model, (num_heads, num_kv_heads) in MODELS.items():
        for rows, length in SHAPES:
            case = Case(num_heads, num_kv_heads, rows, length, options.block_size)
            seconds = case.seconds()
            rate = case.bytes_per_call / seconds
            report(
                "paged_decode", f"{model} bs{options.block_size} {rows}x{length}", us=seconds * 1e6,
                gb_per_s=rate / 1e9, of_read=rate / read, simple_ratio=case.simple_seconds() / seconds,
            )  # fmt: skip


if __name__ == "__main__":
    main()
