"""The linear layers of a block with and without LoRA adapters, in CUDA graphs.

    python -m benchmarks.kernels.bench_low_rank [--rows 1,8,64,2048] [--adapters 1,8,32] [--rank 16]

Layers of Qwen2.5-7B, with the GEMMs that a step uses. Rows name adapters in turn. There are several copies of the
block, so that weights are read from memory, as in a step. A line shows the microseconds of a block without adapters,
and what adapters add with each configuration.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import int_list
from benchmarks.kernels.timing import graph_seconds
from engine.gpu.lowering import MAX_TUNED_ROWS
from engine.gpu.ops.plain import gemm
from engine.gpu.ops.rules import MANY_ROWS
from engine.layers.linear import Linear
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.lora.low_rank import LowRankConfig, SlotWeights, config_of, expand, low_rank_reference, shrink
from kernels.gpu.lora.row_tiles import RowTiles, tile_rows

LAYERS = ((3584, (0, 3584, 4096, 4608)), (3584, (0, 3584)), (3584, (0, 18944, 37888)), (18944, (0, 3584)))
COPIES = 4
Choose = Callable[[SlotWeights], LowRankConfig]
CONFIGS: list[Choose] = [
    config_of,
    *(partial(lambda config, _: config, LowRankConfig(*sizes)) for sizes in ((512, 1024, 4, 3), (512, 2048, 4, 3))),
]


def slots_of_layer(adapters: int, rank: int, k: int, starts: tuple[int, ...]) -> SlotWeights:
    found = SlotWeights.empty(adapters, rank, k, starts, torch.bfloat16, torch.device("cuda"))
    found.a.normal_().mul_(k**-0.5)
    found.b.normal_()
    found.ranks.fill_(rank)
    return found


def run(
    gemms: Sequence[Callable[[Tensor], Tensor]], slots: Sequence[SlotWeights], inputs: Sequence[Tensor],
    tiles: RowTiles, choose: Choose | None,
) -> list[Tensor]:  # fmt: skip
    """Return the outputs of a block's layers. choose: None without adapters."""
    outputs = []
    for own, weights, x in zip(gemms, slots, inputs, strict=True):
        if choose is None:
            outputs.append(own(x))
            continue
        h = shrink(x, weights, tiles, choose(weights))
        outputs.append(own(x))
        expand(outputs[-1], h, weights, tiles, choose(weights))
    return outputs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.bench_low_rank")
    parser.add_argument("--rows", type=int_list, default=[1, 8, 64, 2048])
    parser.add_argument("--adapters", type=int_list, default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    workspace = SplitKWorkspace(torch.device("cuda"))
    bases = [
        [Linear(torch.randn(starts[-1], k, device="cuda").bfloat16() * k**-0.5) for k, starts in LAYERS]
        for _ in range(COPIES)
    ]
    for adapters, rows in itertools.product(options.adapters, options.rows):
        slots = [[slots_of_layer(adapters, options.rank, k, starts) for k, starts in LAYERS] for _ in range(COPIES)]
        inputs = [torch.randn(rows, k, device="cuda").bfloat16() for k, _ in LAYERS]
        named = [row % adapters for row in range(rows)]
        tiles = RowTiles(*(part.cuda() for part in tile_rows(named, adapters)))
        num_rows = rows if rows <= MAX_TUNED_ROWS else MANY_ROWS

        blocks = [
            partial(run, [gemm(base, num_rows, workspace) for base in own], held, inputs, tiles)
            for own, held in zip(bases, slots, strict=True)
        ]
        plain, ours = blocks[0](None), blocks[0](CONFIGS[0])
        picked = torch.tensor(named[:64], device="cuda")
        for own, y, with_adapters, x in zip(slots[0], plain, ours, inputs, strict=True):
            wanted = low_rank_reference(y[:64], x[:64], own, picked)
            error = float((with_adapters[:64].double() - wanted).norm() / wanted.norm())
            assert error < 1e-2, f"the kernels' result is off by {error}"
        base = 1e6 * graph_seconds([partial(block, None) for block in blocks])
        added = [1e6 * graph_seconds([partial(block, choose) for block in blocks]) - base for choose in CONFIGS]
        told = " ".join(f"{each:.0f}" for each in added)
        ratio = base / (base + min(added))
        print(f"rows {rows} adapters {adapters}: {base:.0f} us, added {told} us, {ratio:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
