"""latent_decode: read bandwidth of the latents, beside the measured one and beside expanded keys and values.

    python -m benchmarks.kernels.attention.bench_latent_decode [--heads 16] [--shapes 1x8192,8x8192,64x4096] [--sweep]

`naive_floor_us` is the time to read keys and values of the naive form once, heads * (192 + 128) numbers a token:
no attention over them is faster. `naive_us` is torch's, over them laid out contiguously.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from contextlib import suppress
from itertools import product

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.timing import compile_ahead, graph_seconds, num_input_sets, read_bandwidth, report, sweep
from kernels.gpu.attention.decode_plan import DecodePlan, make_plan, num_programs
from kernels.gpu.attention.kv_splits import DecodeWorkspace
from kernels.gpu.launch import num_multiprocessors
from kernels.gpu.mla.latent_decode import MAX_HEADS, latent_decode
from kernels.gpu.mla.latent_tuning import LATENT_DECODE
from kernels.gpu.tuning import DecodeConfig

RANK, ROTATED, NOPE, VALUE, BLOCK_SIZE = 512, 64, 128, 128, 64
MAX_NAIVE_BYTES = 30 << 30
NUM_SHOWN = 5
SWEEP = [
    DecodeConfig(*options)
    for options in product((16, 32, 64), (4, 8), (2, 3, 4), (1, 2, 4))
    if options[0] * options[2] <= 192
]


class Case:
    """Random inputs of one shape; the layers of one pool are the rotating input sets."""

    def __init__(self, num_heads: int, rows: int, length: int) -> None:
        self.num_heads, self.rows, self.length = num_heads, rows, length
        width = RANK + ROTATED
        self.bytes_per_call = 2 * rows * length * width
        self.num_layers = num_input_sets(self.bytes_per_call, 32)
        blocks = rows * -(-length // BLOCK_SIZE)
        shape = (blocks, self.num_layers, 1, 1, BLOCK_SIZE, width)
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.q = torch.randn(rows, num_heads, width, device="cuda").bfloat16()
        self.table = torch.randperm(blocks, device="cuda").view(rows, -1).int()
        self.lengths = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        most = 4 * num_multiprocessors(self.q.device)  # of the sweep
        self.workspace = DecodeWorkspace(rows, num_heads, 1, RANK, self.q.device, programs=most)

    def plan(self, config: DecodeConfig) -> DecodePlan:
        num_groups = -(-self.num_heads // MAX_HEADS)
        return make_plan(self.lengths, config, num_programs(num_groups, self.q.device, config))

    def run(self, layer: int, plan: DecodePlan) -> None:
        scale = (NOPE + ROTATED) ** -0.5
        latent_decode(self.q, self.pool, RANK, scale, layer, self.table, self.lengths, plan, self.workspace)

    def seconds(self, config: DecodeConfig = LATENT_DECODE) -> float:
        plan = self.plan(config)
        return graph_seconds([functools.partial(self.run, layer, plan) for layer in range(self.num_layers)])

    def naive_bytes(self) -> int:
        return 2 * self.rows * self.length * self.num_heads * (NOPE + ROTATED + VALUE)

    def naive_seconds(self) -> float:
        """Time torch's attention over expanded keys and values."""
        heads = (self.rows, self.num_heads)
        k = torch.empty(*heads, self.length, NOPE + ROTATED, dtype=torch.bfloat16, device="cuda").normal_()
        v = torch.empty(*heads, self.length, VALUE, dtype=torch.bfloat16, device="cuda").normal_()
        q = torch.randn(*heads, 1, NOPE + ROTATED, device="cuda").bfloat16()
        return graph_seconds([lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)] * 4)


def compile_some(num_heads: int, configs: Sequence[DecodeConfig]) -> None:
    case = Case(num_heads, 2, 256)
    for config in configs:
        with suppress(OutOfResources):
            case.run(0, case.plan(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--shapes", default="1x1024,1x8192,8x1024,8x8192,64x1024,64x4096,256x1024")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    if options.sweep:
        compile_ahead(functools.partial(compile_some, options.heads), SWEEP)
    bandwidth = read_bandwidth()
    for text in options.shapes.split(","):
        rows, length = map(int, text.split("x"))
        case = Case(options.heads, rows, length)
        time = case.seconds()
        figures: dict[str, float | str] = {"us": time * 1e6, "bandwidth": case.bytes_per_call / time / bandwidth}
        figures["naive_floor_us"] = case.naive_bytes() / bandwidth * 1e6
        if case.naive_bytes() < MAX_NAIVE_BYTES:
            figures["naive_us"] = case.naive_seconds() * 1e6
        if options.sweep:
            figures["best"] = "; ".join(
                f"{time * 1e6:.1f} ({c.tile}, {c.num_warps}, {c.num_stages}, {c.programs_per_sm})"
                for time, c in sweep(SWEEP, case.seconds)[:NUM_SHOWN]
            )
        report("latent_decode", f"{options.heads} heads {text}", **figures)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
