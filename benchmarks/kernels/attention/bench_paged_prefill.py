"""paged_prefill: TFLOP/s of causal attention (4 x head_dim per visible pair and head), against torch's attention.

`--sweep` tries settings. `--window`: keys that queries see, of longer contexts.
"""

from __future__ import annotations

import argparse
import functools

import torch
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.timing import graph_seconds, report
from kernels.gpu.attention.paged_prefill import paged_prefill, takes_boxes
from kernels.gpu.attention.prompt_tiles import LARGE_TILE, SMALL_TILE, choose_tile, prefill_tiles
from kernels.gpu.tuning import PrefillConfig

MODELS = {
    "qwen2.5-7b": (28, 4, 128), "qwen3-0.6b": (16, 8, 128), "gemma3-4b": (8, 4, 256), "gpt-oss-20b": (64, 8, 64)
}  # fmt: skip
SHAPES = [(512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (512, 8704), (2048, 18432)]
KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
BY_DESCRIPTOR = [(64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3)]
BY_POINTERS = [(64, 4, 3), (128, 4, 2), (64, 8, 2), (64, 8, 3), (128, 8, 2), (128, 8, 3)]


class Case:
    """Random inputs: the last `queries` tokens of a sequence of `length`."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, queries: int, length: int, block_size: int,
        kv_dtype: torch.dtype, window: int = 0,
    ) -> None:  # fmt: skip
        blocks = length // block_size
        shape = (blocks, 2, 2, num_kv_heads, block_size, head_dim)
        self.window = window
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().to(kv_dtype)
        self.q = torch.randn(queries, num_heads, head_dim, device="cuda").bfloat16()
        self.table = torch.randperm(blocks, device="cuda").int()[None]
        self.queries, self.length, self.group = queries, length, num_heads // num_kv_heads
        pairs = sum(min(key + 1, window or key + 1) for key in range(length - queries, length))
        self.flop = 4 * head_dim * num_heads * pairs

    def seconds(self, tile_m: int, config: PrefillConfig | None = None, has_boxes: bool | None = None) -> float:
        tiles = prefill_tiles([0, self.queries], [self.length], self.group, tile_m)
        on_device = torch.tensor(tiles, dtype=torch.int32, device="cuda")
        prefill = functools.partial(
            paged_prefill, self.q, self.pool, block_tables=self.table, tiles=on_device, tile_m=tile_m, config=config,
            has_boxes=has_boxes, window=self.window,
        )  # fmt: skip
        calls = [functools.partial(prefill, layer=layer) for layer in (0, 1)]
        return graph_seconds(calls)


def torch_seconds(num_heads: int, num_kv_heads: int, head_dim: int, queries: int) -> float:
    """Time torch's causal attention over contiguous keys and values (no paging)."""
    q = torch.randn(1, num_heads, queries, head_dim, device="cuda").bfloat16()
    k, v = torch.randn(2, 1, num_kv_heads, queries, head_dim, device="cuda").bfloat16()
    call = functools.partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    return graph_seconds([call, call])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--model", choices=MODELS, help="one of the models; default: all")
    parser.add_argument("--window", type=int, default=0)
    options = parser.parse_args()
    for model in [options.model] if options.model else MODELS:
        heads = MODELS[model]
        for queries, length in SHAPES:
            kv_dtype = KV_DTYPES[options.kv_dtype]
            case = Case(*heads, queries, length, options.block_size, kv_dtype, options.window)
            shape = f"{model} {options.kv_dtype} bs{options.block_size} {queries}/{length}"
            if options.sweep:
                sweep(case, shape)
                continue
            tile_m = choose_tile(queries, heads[0], case.q.device)
            seconds = case.seconds(tile_m)
            figures = {"us": seconds * 1e6, "tflop_per_s": case.flop / seconds / 1e12}
            if queries == length and not options.window:
                figures["torch_ratio"] = torch_seconds(*heads, queries) / seconds
            report("paged_prefill", shape, **figures)


def sweep(case: Case, shape: str) -> None:
    for has_boxes in [True, False] if takes_boxes(case.pool) else [False]:
        for tile_m in (LARGE_TILE, SMALL_TILE):
            for option in BY_DESCRIPTOR if has_boxes else BY_POINTERS:
                try:
                    seconds = case.seconds(tile_m, PrefillConfig(*option), has_boxes)
                except OutOfResources:
                    continue
                rate = case.flop / seconds / 1e12
                name = f"{'boxes' if has_boxes else 'pointers'} {tile_m}x{'x'.join(map(str, option))}"
                report("paged_prefill sweep", shape, config=name, us=seconds * 1e6, tflop_per_s=rate)


if __name__ == "__main__":
    main()
