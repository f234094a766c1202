"""Backends of prefill attention side by side: TFLOP/s (4 x head_dim per visible pair and head) through their seam.

    python -m benchmarks.kernels.attention.bench_attention_backends

Gathering a cached prefix is part of the time. A backend that is not installed is left out. `ratio` is the time of our
Triton kernel over the backend's.
"""

from __future__ import annotations

import argparse
import functools
from itertools import accumulate

import torch

from benchmarks.kernels.timing import graph_seconds, report
from common.errors import ConfigError
from engine.gpu.attention.backend import PrefillAttention
from engine.gpu.attention.grouped import open_attention

HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 128, 64, 2
MODELS = {"qwen2.5-7b": (28, 4), "qwen3-0.6b": (16, 8)}
PROMPTS = [100, 1024, 333, 512, 777, 900, 64, 640, 1000, 256]
CASES = {  # queries and keys of each row
    "1k": [(1024, 1024)],
    "2k": [(2048, 2048)],
    "4.5k": [(4500, 4500)],
    "8k": [(8192, 8192)],
    "8k over 8k": [(8192, 16384)],
    "2k over 16k": [(2048, 18432)],
    "512 over 8k": [(512, 8704)],
    "64 over 8k": [(64, 8256)],
    "10 prompts": [(length, length) for length in PROMPTS],
    "10 prompts over 1k": [(length, length + 1024) for length in PROMPTS],
}


def seconds(backend: PrefillAttention, pool: torch.Tensor, qkv: torch.Tensor, rows: list[tuple[int, int]]) -> float:
    """Return the seconds of one layer."""
    counts = [-(-keys // BLOCK_SIZE) for _, keys in rows]
    blocks = torch.split(torch.randperm(sum(counts)), counts)
    table = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True).int().cuda()
    starts = list(accumulate((queries for queries, _ in rows), initial=0))
    plan = backend.plan(starts, [keys for _, keys in rows], table)
    width = (qkv.shape[1] - 2 * pool.shape[3]) * HEAD_DIM
    out = torch.empty(starts[-1], width, dtype=qkv.dtype, device="cuda")
    return graph_seconds([functools.partial(plan.attend, qkv[: starts[-1]], pool, i, out) for i in range(NUM_LAYERS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="triton,cudnn,fa3")
    options = parser.parse_args()
    for model, (num_heads, num_kv_heads) in MODELS.items():
        shape = (18432 // BLOCK_SIZE + 16, NUM_LAYERS, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM)
        pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        qkv = torch.randn(8192, num_heads + 2 * num_kv_heads, HEAD_DIM, device="cuda").bfloat16()
        backends = []
        for name in options.backends.split(","):
            try:
                backends.append(open_attention(name, pool, num_heads, torch.bfloat16, 8192))
            except ConfigError as error:
                print(error)
        for case, rows in CASES.items():
            pairs = sum(queries * (keys - queries) + queries * (queries + 1) // 2 for queries, keys in rows)
            times = {backend.name: seconds(backend, pool, qkv, rows) for backend in backends}
            for name, taken in times.items():
                figures = {"us": taken * 1e6, "tflop_per_s": 4 * HEAD_DIM * num_heads * pairs / taken / 1e12}
                if "triton" in times:
                    figures["ratio"] = times["triton"] / taken
                report("attention", f"{model} {case} {name}", **figures)


if __name__ == "__main__":
    main()
