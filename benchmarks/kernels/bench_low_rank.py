"""Shrink and expand of LoRA adapters in CUDA graphs, beside the GEMM of the layer that they add to.

    python -m benchmarks.kernels.bench_low_rank [--rows 1,8,64,2048] [--adapters 1,8,32] [--rank 16]

Layers of Qwen2.5-7B. Rows name adapters in turn. A layer's weights are of several copies, so that a GEMM reads them
from memory, as in a step.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import int_list
from benchmarks.kernels.timing import graph_seconds
from kernels.gpu.lora.low_rank import LowRankConfig, add_low_rank, low_rank_reference
from kernels.gpu.lora.row_tiles import RowTiles, tile_rows

LAYERS = {"qkv": (3584, 4608), "o": (3584, 3584), "gate_up": (3584, 37888), "down": (18944, 3584)}
COPIES = 4
CONFIGS = [LowRankConfig(*sizes) for sizes in ((512,), (512, 2048), (512, 1024), (256, 1024), (256, 512))]


def pair_of(adapters: int, rank: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    a = torch.randn(adapters, rank, k, device="cuda") * k**-0.5
    return a.bfloat16(), torch.randn(adapters, n, rank, device="cuda").bfloat16()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.bench_low_rank")
    parser.add_argument("--rows", type=int_list, default=[1, 8, 64, 2048])
    parser.add_argument("--adapters", type=int_list, default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    totals: dict[tuple[int, int], list[float]] = {}
    for (name, (k, n)), adapters in itertools.product(LAYERS.items(), options.adapters):
        weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(COPIES)]
        pairs = [pair_of(adapters, options.rank, k, n) for _ in range(COPIES)]
        a, b = pairs[0]
        for rows in options.rows:
            x, y = torch.randn(rows, k, device="cuda").bfloat16(), torch.zeros(rows, n, device="cuda").bfloat16()
            slots = [row % adapters for row in range(rows)]
            tiles = RowTiles(*(part.cuda() for part in tile_rows(slots, adapters)))
            wanted = low_rank_reference(y[:64], x[:64], a, b, torch.tensor(slots[:64], device="cuda"))
            add_low_rank(y, x, a, b, tiles)
            error = float((y[:64].double() - wanted).norm() / wanted.norm())
            gemm = 1e6 * graph_seconds([partial(torch.mm, x, weight.T) for weight in weights])
            ours = [
                1e6 * graph_seconds([partial(add_low_rank, y, x, *pair, tiles, config) for pair in pairs])
                for config in CONFIGS
            ]
            best = min(ours)
            known = totals.setdefault((rows, adapters), [0.0, 0.0])
            known[0] += gemm
            known[1] += best
            told = " ".join(f"{each:.1f}" for each in ours)
            print(
                f"{name} rows {rows} adapters {adapters}: GEMM {gemm:.1f} us, ours {told} us, error {error:.1e}",
                flush=True,
            )
    for (rows, adapters), (gemm, best) in totals.items():
        part = gemm / (gemm + best)
        print(f"a layer, rows {rows} adapters {adapters}: GEMMs {gemm:.0f} us, adapters {best:.0f} us, {part:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
