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
    MAX_SPLITS,
    DecodeTuning,
    DecodeWorkspace,
    num_splits,
    paged_decode,
    simple_decode,
)

SHAPES = [(1, 1024), (1, 4096), (1, 32768), (8, 1024), (8, 4096), (64, 1024), (64, 4096), (256, 1024)]
MODELS = {
    "qwen2.5-7b": (28, 4, 128), "qwen3-0.6b": (16, 8, 128), "llama3.1-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64)
}  # fmt: skip
KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class Case:
    """Random inputs of one shape; the layers of one pool are the rotating input sets."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, rows: int, length: int, block_size: int,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.bytes_per_call = 2 * kv_dtype.itemsize * rows * num_kv_heads * length * head_dim
        self.num_layers = num_input_sets(self.bytes_per_call, 48)
        blocks = rows * -(-length // block_size)
        self.pool = torch.empty(
            blocks, self.num_layers, 2, num_kv_heads, block_size, head_dim, dtype=torch.bfloat16, device="cuda"
        ).normal_().to(kv_dtype)  # fmt: skip
        self.q = torch.randn(rows, num_heads, head_dim, device="cuda").bfloat16()
        self.table = torch.randperm(blocks, device="cuda").view(rows, -1).int()
        self.lengths = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        self.workspace = DecodeWorkspace(rows, num_heads, num_kv_heads, head_dim, self.q.device)
        most = rows * num_heads * MAX_SPLITS
        self.workspace.outputs = torch.empty(most, head_dim, device="cuda")
        self.workspace.log_sums = torch.empty(most, device="cuda")

    def seconds(self, tuning: DecodeTuning | None = None, splits: int | None = None) -> float:
        return graph_seconds([functools.partial(self.run, layer, tuning, splits) for layer in range(self.num_layers)])

    def run(self, layer: int, tuning: DecodeTuning | None, splits: int | None) -> Tensor:
        return paged_decode(self.q, self.pool, layer, self.table, self.lengths, self.workspace, tuning, splits)

    def simple_seconds(self) -> float:
        return graph_seconds(
            [
                functools.partial(simple_decode, self.q, self.pool, layer, self.table, self.lengths)
                for layer in range(self.num_layers)
            ],
            3,
        )


def sweep(read: float, block_size: int, kv_dtype: str) -> None:
    options = [(64, 4, 4), (64, 4, 5), (64, 4, 6), (32, 4, 5), (64, 2, 4), (64, 2, 5), (32, 2, 5)]
    for model in ("qwen2.5-7b", "qwen3-0.6b"):
        for rows, length in SHAPES:
            case = Case(*MODELS[model], rows, length, block_size, KV_DTYPES[kv_dtype])
            num_heads, num_kv_heads = MODELS[model][:2]
            base = num_splits(rows, num_kv_heads, num_heads // num_kv_heads, case.q.device)
            results = []
            for tile, num_warps, num_stages in options:
                for splits in sorted({min(base * f, MAX_SPLITS) for f in (1, 2)} | {max(base // 2, 1)}):
                    seconds = case.seconds(DecodeTuning(tile, num_warps, num_stages), splits)
                    results.append((seconds, f"tile{tile} w{num_warps} s{num_stages} x{splits}"))
            results.sort()
            best = " | ".join(f"{name} {seconds * 1e6:.1f}" for seconds, name in results[:4])
            rate = case.bytes_per_call / results[0][0]
            report(
                "paged_decode sweep", f"{model} {kv_dtype} bs{block_size} {rows}x{length}", best=best,
                of_read=rate / read, worst_us=results[-1][0] * 1e6,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--model", choices=MODELS, help="one of the models; default: all")
    options = parser.parse_args()
    read = read_bandwidth()
    if options.sweep:
        sweep(read, options.block_size, options.kv_dtype)
        return
    for model in [options.model] if options.model else MODELS:
        for rows, length in SHAPES:
            case = Case(*MODELS[model], rows, length, options.block_size, KV_DTYPES[options.kv_dtype])
            seconds = case.seconds()
            rate = case.bytes_per_call / seconds
            report(
                "paged_decode", f"{model} {options.kv_dtype} bs{options.block_size} {rows}x{length}",
                us=seconds * 1e6, gb_per_s=rate / 1e9, of_read=rate / read,
                simple_ratio=case.simple_seconds() / seconds,
            )  # fmt: skip


if __name__ == "__main__":
    main()
