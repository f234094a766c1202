"""paged_decode: read bandwidth of K and V, against the measured one and the kernel without splits.

Each call follows the rotation of its rows, as in a step, and the rotation's own time is taken off: which programs are
still running when those of attention come decides where these find room (docs/decisions/attention-kernels.md).

`--sweep` tries tile sizes, warps, stages and programs; `kernels/gpu/tuning.py` comes from it. `--window`:
keys that queries see, of longer contexts. `--trace` takes lengths of rows from a trace, and compares with equal ones
of the same sum.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.harness import trace_lengths
from benchmarks.kernels.attention.simple_decode import simple_decode
from benchmarks.kernels.timing import graph_seconds, num_input_sets, read_bandwidth, report
from kernels.gpu.attention.decode_plan import DecodePlan, make_plan, num_programs, plan_decode
from kernels.gpu.attention.kv_splits import DecodeWorkspace
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.elementwise.rope import rope_and_write_kv
from kernels.gpu.tuning import DecodeConfig

SHAPES = [(1, 1024), (1, 4096), (1, 32768), (8, 1024), (8, 4096), (64, 1024), (64, 4096), (256, 1024)]
MODELS = {
    "qwen2.5-7b": (28, 4, 128), "qwen2.5-7b/2": (14, 2, 128), "qwen3-0.6b": (16, 8, 128),
    "llama3.1-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64), "gemma3-4b": (8, 4, 256), "gpt-oss-20b": (64, 8, 64),
}  # fmt: skip
KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
PROGRAMS_PER_SM = 2, 4, 8
OPTIONS = {  # tile, warps, stages
    "bfloat16": [(32, 2, 5), (32, 2, 7), (16, 1, 6), (16, 1, 8), (32, 1, 4), (32, 1, 6), (64, 4, 4), (16, 2, 8)],
    "fp8": [(64, 1, 3), (64, 1, 4), (32, 1, 6), (32, 2, 5), (32, 2, 7), (64, 2, 5), (64, 4, 5), (128, 4, 4)],
}


class Case:
    """Random inputs of one shape; the layers of one pool are the rotating input sets."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, lengths: Sequence[int], block_size: int,
        kv_dtype: torch.dtype = torch.bfloat16, window: int = 0,
    ) -> None:  # fmt: skip
        self.window, rows = window, len(lengths)
        seen = sum(min(length, window or length) for length in lengths)
        self.bytes_per_call = 2 * kv_dtype.itemsize * num_kv_heads * seen * head_dim
        self.num_layers = num_input_sets(self.bytes_per_call, 48)
        counts = [-(-length // block_size) for length in lengths]
        blocks = sum(counts)
        self.pool = torch.empty(
            blocks, self.num_layers, 2, num_kv_heads, block_size, head_dim, dtype=torch.bfloat16, device="cuda"
        ).normal_().to(kv_dtype)  # fmt: skip
        self.qkv = torch.randn(rows, num_heads + 2 * num_kv_heads, head_dim, device="cuda").bfloat16()
        self.q = self.qkv[:, :num_heads]
        self.angles = torch.tensor([1.0, 0.0]).repeat_interleave(head_dim).view(1, 2, head_dim).cuda().bfloat16()
        self.zeros = torch.zeros(rows, dtype=torch.int32, device="cuda")
        self.slots = self.zeros - 1
        of_rows = torch.randperm(blocks, device="cuda").int()
        self.table = torch.nn.utils.rnn.pad_sequence(list(torch.split(of_rows, counts)), batch_first=True)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        most = num_programs(num_kv_heads, self.q.device, DecodeConfig(0, 0, 0, max(PROGRAMS_PER_SM)))
        self.workspace = DecodeWorkspace(rows, num_heads, num_kv_heads, head_dim, self.q.device, programs=most)

    def seconds(self, config: DecodeConfig | None = None, programs: int | None = None) -> float:
        """Time one layer, without the plan, which all layers of a step share. programs: per KV head."""
        plan = plan_decode(self.lengths, self.q.shape[1], self.pool, self.window)
        if config is not None or programs is not None:
            config = config or plan.config
            count = programs or num_programs(self.pool.shape[3], self.q.device, config)
            plan = make_plan(self.lengths, config, count, self.window)
        layers = range(self.num_layers)
        both = graph_seconds([functools.partial(self.rotate_and_run, layer, plan) for layer in layers])
        return both - graph_seconds([functools.partial(self.rotate, layer) for layer in layers])

    def rotate(self, layer: int) -> None:
        """Rotate by zero, without storing K and V."""
        rope_and_write_kv(self.qkv, self.angles, self.zeros, self.slots, None, 1e-6, self.pool, layer)

    def rotate_and_run(self, layer: int, plan: DecodePlan) -> Tensor:
        self.rotate(layer)
        return paged_decode(self.q, self.pool, layer, self.table, self.lengths, plan, self.workspace)

    def simple_seconds(self) -> float:
        return graph_seconds(
            [
                functools.partial(simple_decode, self.q, self.pool, layer, self.table, self.lengths)
                for layer in range(self.num_layers)
            ],
            3,
        )


def sweep(
    models: list[str], shapes: Mapping[str, Sequence[int]], read: float, block_size: int, kv_dtype: str, window: int
) -> None:  # fmt: skip
    for model in models:
        for shape, lengths in shapes.items():
            case = Case(*MODELS[model], lengths, block_size, KV_DTYPES[kv_dtype], window)
            results = {}
            for option, programs_per_sm, lists_blocks in product(OPTIONS[kv_dtype], PROGRAMS_PER_SM, (False, True)):
                config = DecodeConfig(*option, programs_per_sm, lists_blocks)
                name = f"{'/'.join(map(str, option))}{' lists' * lists_blocks} x{programs_per_sm}"
                if not (lists_blocks and option[0] > block_size):
                    with suppress(OutOfResources):
                        results[name] = case.seconds(config)
            fastest = sorted(results.items(), key=lambda item: item[1])
            report(
                "paged_decode sweep", f"{model} {kv_dtype} bs{block_size} {shape}",
                best=" | ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in fastest[:6]),
                of_read=case.bytes_per_call / fastest[0][1] / read, chosen_us=case.seconds() * 1e6,
            )  # fmt: skip


def compare_with_equal(model: str, name: str, lengths: Sequence[int], block_size: int, kv_dtype: str) -> None:
    equal = [sum(lengths) // len(lengths)] * len(lengths)
    cases = [Case(*MODELS[model], each, block_size, KV_DTYPES[kv_dtype]) for each in (lengths, equal)]
    seconds = [case.seconds() for case in cases]
    report(
        "paged_decode of a trace's lengths", f"{model} {kv_dtype} bs{block_size} {name}",
        keys=sum(lengths), longest=max(lengths),
        us=seconds[0] * 1e6, equal_us=seconds[1] * 1e6, ratio=seconds[0] / seconds[1],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--model", choices=MODELS, help="one of the models; default: all")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--shapes", default="", help="rows x tokens, instead of the usual ones: 1x1024,8x4096")
    parser.add_argument("--trace", type=Path, help="trace file: rows have the lengths of its requests")
    parser.add_argument("--rows", default="8,10,16,32,64", help="how many rows, of `--trace`")
    parser.add_argument("--longest", type=int, default=30_000, help="tokens of a request, of `--trace`")
    options = parser.parse_args()
    models = [options.model] if options.model else list(MODELS)
    pairs = [each.split("x") for each in options.shapes.split(",") if each]
    shapes = [(int(rows), int(length)) for rows, length in pairs] or SHAPES
    read = read_bandwidth()
    if options.trace:
        draws = {
            f"{rows} rows, draw {seed}": trace_lengths(options.trace, rows, options.longest, seed)
            for rows, seed in product(map(int, options.rows.split(",")), range(3))
        }
    else:
        draws = {f"{rows}x{length}": [length] * rows for rows, length in shapes}
    if options.sweep:
        sweep(models, draws, read, options.block_size, options.kv_dtype, options.window)
        return
    if options.trace:
        for model, (name, lengths) in product(models, draws.items()):
            compare_with_equal(model, name, lengths, options.block_size, options.kv_dtype)
        return
    for model in models:
        for rows, length in shapes:
            kv_dtype = KV_DTYPES[options.kv_dtype]
            case = Case(*MODELS[model], [length] * rows, options.block_size, kv_dtype, options.window)
            seconds = case.seconds()
            rate = case.bytes_per_call / seconds
            report(
                "paged_decode", f"{model} {options.kv_dtype} bs{options.block_size} {rows}x{length}",
                us=seconds * 1e6, gb_per_s=rate / 1e9, of_read=rate / read,
                unsplit_us=case.seconds(programs=rows) * 1e6, simple_ratio=case.simple_seconds() / seconds,
            )  # fmt: skip


if __name__ == "__main__":
    main()
