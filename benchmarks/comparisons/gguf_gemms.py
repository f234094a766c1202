"""Linear layers over packed GGUF blocks on one core, compared with the engine's GEMM over a dense copy of the weight.

    python -m benchmarks.comparisons.gguf_gemms [--rows 1,2,4,8,24,128,512]

The dense copy is oneDNN's in bfloat16, or FBGEMM's in float16 without AVX-512. Weights are random bits, more of each
type than the cache holds. Processor time, best of five.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from benchmarks.harness import int_list
from engine.cpu_gemms.gemms import dense_linear
from kernels.gguf.linear import Blocks, BlockWeight

MAX_INTEGER_ROWS = 24
WEIGHTS = {"Q8_0": (131_072, 896), "Q5_0": (131_072, 896), "Q4_K": (28_672, 4_864), "Q6_K": (28_672, 4_864)}
"""Rows and columns of each type."""


def best_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(6):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return 1e3 * min(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparisons.gguf_gemms")
    parser.add_argument("--rows", type=int_list, default=[1, 2, 4, 8, 24, 128, 512])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, (num_rows, num_columns) in WEIGHTS.items():
        kind = GGMLQuantizationType[name]
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        raw = torch.randint(0, 60, (num_rows, num_columns // block_size * block_bytes), dtype=torch.uint8)
        weight = BlockWeight([Blocks(raw, int(kind))], num_columns)
        dense = dense_linear(torch.randn(num_rows, num_columns).bfloat16(), None)
        for rows in options.rows:
            x = torch.randn(rows, num_columns).bfloat16()
            packed = partial(weight.linear, x, None, torch.bfloat16)
            integers = f"{best_ms(partial(packed, True)):.1f}" if rows <= MAX_INTEGER_ROWS else "-"
            ours, theirs = best_ms(partial(packed, False)), best_ms(partial(dense, x))
            print(
                f"{name} {rows:4} rows: integers {integers}, bfloat16 {ours:.1f}, dense {theirs:.1f} ms", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
