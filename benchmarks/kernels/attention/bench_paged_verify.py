"""paged_verify: rows of several queries in groups, and by `paged_decode` with each query as a row of its own.

    python -m benchmarks.kernels.attention.bench_paged_verify [--shapes 64x3x1000,8x4x4000] [--sweep]

Microseconds of a layer, rotation taken off as in `bench_paged_decode`; `one_us` is `paged_decode` with one query a
row. The largest difference is that of the two outputs. `--sweep` tries other tiles, warps, stages and programs.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from contextlib import suppress
from itertools import product

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.timing import graph_seconds, num_input_sets, report
from kernels.gpu.attention.decode_plan import DecodePlan, make_plan, num_programs, plan_decode
from kernels.gpu.attention.kv_splits import DecodeWorkspace
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.elementwise.rope import rope_and_write_kv
from kernels.gpu.speculation.paged_verify import most_queries, paged_verify
from kernels.gpu.tuning import DecodeConfig

MODELS = {"qwen3-8b": (32, 8, 128), "qwen2.5-7b": (28, 4, 128)}
SHAPES = "64x3x1000,64x3x4000,8x4x1000,8x4x4000"
BLOCK_SIZE = 64
OPTIONS = [(32, 2, 7), (32, 2, 5), (64, 4, 4), (64, 4, 3), (16, 1, 6), (16, 2, 8), (32, 1, 4)]  # tile, warps, stages
NUM_SHOWN = 5


class Case:
    """Random inputs of rows with several queries; the layers of one pool are the rotating input sets."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, rows: int, queries: int, length: int
    ) -> None:
        """length: keys that a row's first query sees."""
        count, last = rows * queries, length + queries - 1
        self.num_layers = num_input_sets(4 * rows * num_kv_heads * last * head_dim, 48)
        blocks = rows * -(-last // BLOCK_SIZE)
        shape = blocks, self.num_layers, 2, num_kv_heads, BLOCK_SIZE, head_dim
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.qkv = torch.randn(count, num_heads + 2 * num_kv_heads, head_dim, device="cuda").bfloat16()
        self.q = self.qkv[:, :num_heads]
        self.angles = torch.tensor([1.0, 0.0]).repeat_interleave(head_dim).view(1, 2, head_dim).cuda().bfloat16()
        self.zeros = torch.zeros(count, dtype=torch.int32, device="cuda")
        self.slots = self.zeros - 1
        self.table = torch.randperm(blocks, device="cuda").view(rows, -1).int().repeat_interleave(queries, 0)
        number, most = torch.arange(queries, dtype=torch.int32), most_queries(num_heads // num_kv_heads)
        end = (number // most * most + most).clamp(max=queries)
        leads = (number % most == 0).repeat(rows)
        num_groups = int(leads.sum())
        fields = torch.zeros(4, count, dtype=torch.int32)
        fields[:2] = torch.stack([length + number, length + end - 1]).repeat(1, rows)
        fields[2, :num_groups] = leads.nonzero()[:, 0]
        fields[3, :num_groups] = (end - number).repeat(rows)[leads]
        self.lengths, self.groups = fields[0].cuda(), fields[1:].cuda()
        self.last = slice(queries - 1, None, queries)  # last query of each row
        self.last_lengths = self.lengths[self.last].contiguous()
        self.workspace = DecodeWorkspace(count, num_heads, num_kv_heads, head_dim, self.q.device, most)

        spans = self.groups[0]
        self.plan = plan_decode(spans, num_heads, self.pool, 0, self.groups, most)
        self.decode_plan = plan_decode(self.lengths, num_heads, self.pool)
        self.one_plan = plan_decode(self.last_lengths, num_heads, self.pool)

    def plan_with(self, config: DecodeConfig) -> DecodePlan:
        count = num_programs(self.pool.shape[3], self.q.device, config)
        return make_plan(self.groups[0], config, count, 0, self.groups, self.plan.queries)

    def verify(self, layer: int, plan: DecodePlan | None = None) -> Tensor:
        return paged_verify(
            self.q, self.pool, layer, self.table, self.lengths, self.groups, plan or self.plan, self.workspace
        )  # fmt: skip

    def decode(self, layer: int) -> Tensor:
        return paged_decode(self.q, self.pool, layer, self.table, self.lengths, self.decode_plan, self.workspace)

    def decode_one(self, layer: int) -> Tensor:
        """Attend only for the last query of each row."""
        q, table = self.q[self.last], self.table[self.last]
        return paged_decode(q, self.pool, layer, table, self.last_lengths, self.one_plan, self.workspace)

    def seconds(self, attend: Callable[[int], Tensor]) -> float:
        layers = range(self.num_layers)
        both = graph_seconds([functools.partial(self.rotate_and_run, attend, layer) for layer in layers])
        return both - graph_seconds([functools.partial(self.rotate, layer) for layer in layers])

    def rotate_and_run(self, attend: Callable[[int], Tensor], layer: int) -> Tensor:
        self.rotate(layer)
        return attend(layer)

    def rotate(self, layer: int) -> None:
        """Rotate by zero, without storing K and V."""
        rope_and_write_kv(self.qkv, self.angles, self.zeros, self.slots, None, 1e-6, self.pool, layer)

    def fastest(self) -> str:
        """Return the fastest settings: tile/warps/stages, programs per multiprocessor, microseconds."""
        found = {}
        for option, lists_blocks, per_sm in product(OPTIONS, (False, True), (2, 4)):
            with suppress(OutOfResources):
                attend = functools.partial(
                    self.verify, plan=self.plan_with(DecodeConfig(*option, per_sm, lists_blocks))
                )
                found[f"{'/'.join(map(str, option))}{' lists' * lists_blocks} x{per_sm}"] = self.seconds(attend)
        best = sorted(found.items(), key=lambda item: item[1])[:NUM_SHOWN]
        return " | ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="rows x queries of each x tokens")
    parser.add_argument("--model", choices=MODELS, help="one of the models; default: all")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    for model, text in product([options.model] if options.model else MODELS, options.shapes.split(",")):
        rows, queries, length = map(int, text.split("x"))
        case = Case(*MODELS[model], rows, queries, length)
        difference = float((case.verify(0).float() - case.decode(0).float()).abs().max())
        verify, decode, one = (case.seconds(each) for each in (case.verify, case.decode, case.decode_one))
        more = {"best": case.fastest()} if options.sweep else {}
        report(
            "paged_verify", f"{model} {text}", us=verify * 1e6, decode_us=decode * 1e6, one_us=one * 1e6,
            difference=difference, **more,
        )  # fmt: skip
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
