"""paged_prefill: TFLOP/s of causal attention (4 x head_dim per visible pair and head), against torch's attention."""

from __future__ import annotations

import argparse
import functools

import torch
from torch.nn import functional

from benchmarks.kernels.timing import graph_seconds, report
from kernels.gpu.paged_prefill import DEFAULT_TUNING, PrefillTuning, paged_prefill, prefill_tiles

HEAD_DIM = 128
SHAPES = [(2048, 2048), (8192, 8192), (512, 8704), (2048, 18432)]
OPTIONS = [
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3),
    (64, 128, 4, 2), (128, 64, 4, 3),
]  # fmt: skip


def prefill_seconds(
    num_heads: int, num_kv_heads: int, queries: int, length: int, block_size: int, tuning: PrefillTuning
) -> float:
    blocks = length // block_size
    pool = torch.empty(
        blocks, 2, 2, num_kv_heads, block_size, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
    ).normal_()
    q = torch.randn(queries, num_heads, HEAD_DIM, device="cuda").bfloat16()
    table = torch.randperm(blocks, device="cuda").int()[None]
    tiles = prefill_tiles([0, queries], [length], num_heads // num_kv_heads, tuning)
    device_tiles = torch.tensor(tiles, dtype=torch.int32, device="cuda")
    return graph_seconds(
        [functools.partial(paged_prefill, q, pool, layer, table, device_tiles, tuning) for layer in (0, 1)]
    )


def torch_seconds(num_heads: int, num_kv_heads: int, queries: int) -> float:
    """torch's causal attention, keys and values already contiguous (no paging)."""
    q = torch.randn(1, num_heads, queries, HEAD_DIM, device="cuda").bfloat16()
    k, v = torch.randn(2, 1, num_kv_heads, queries, HEAD_DIM, device="cuda").bfloat16()
    call = functools.partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    return graph_seconds([call, call])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--block-size", type=int, default=64)
    options = parser.parse_args()
    for model, num_heads, num_kv_heads in (("qwen2.5-7b", 28, 4), ("qwen3-0.6b", 16, 8)):
        for queries, length in SHAPES:
            pairs = queries * (length - queries) + queries * (queries + 1) // 2
            flop = 4 * HEAD_DIM * num_heads * pairs
            tunings = [PrefillTuning(*option) for option in OPTIONS] if options.sweep else [DEFAULT_TUNING]
            for tuning in tunings:
                seconds = prefill_seconds(num_heads, num_kv_heads, queries, length, options.block_size, tuning)
                figures: dict[str, float | str] = {"us": seconds * 1e6, "tflop_per_s": flop / seconds / 1e12}
                if options.sweep:
                    figures["tuning"] = f"{tuning.tile_m}x{tuning.tile_n} w{tuning.num_warps} s{tuning.num_stages}"
                elif queries == length:
                    figures["torch_ratio"] = torch_seconds(num_heads, num_kv_heads, queries) / seconds
                report("paged_prefill", f"{model} bs{options.block_size} {queries}/{length}", **figures)


if __name__ == "__main__":
    main()
