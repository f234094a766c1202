"""rope_and_write_kv: bandwidth against a copy, and time against eager torch (rotate-half, then index_put)."""

from __future__ import annotations

import argparse
import functools

import torch
from torch import Tensor

from benchmarks.kernels.bench_rms_norm import eager_rms_norm
from benchmarks.kernels.timing import copy_bandwidth, graph_seconds, num_input_sets, report, report_against_copy
from kernels.gpu.elementwise.rope import rope_and_write_kv
from kernels.gpu.tuning import RopeConfig
from kernels.paged_attention import write_kv

HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 128, 64, 4
TUNINGS = [
    (1, 8, 1), (1, 8, 2), (2, 8, 2), (2, 8, 4), (4, 8, 4), (4, 8, 8), (8, 8, 8), (4, 4, 2), (8, 4, 4), (2, 16, 4),
    (16, 2, 4),
]  # fmt: skip


def eager_rope(
    qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, norm: Tensor | None, pool: Tensor, layer: int
) -> Tensor:
    num_kv_heads = pool.shape[3]
    q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = table[positions, 0][:, None], table[positions, 1][:, None]
    if norm is not None:
        q, k = (eager_rms_norm(x, norm[: x.shape[1]]) for x in (q, k))
    q, k = (x * cos + torch.cat([x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]], -1) * sin for x in (q, k))
    write_kv(pool, layer, torch.stack([k, v], dim=1), slots // BLOCK_SIZE, slots % BLOCK_SIZE)
    return q


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    copy = copy_bandwidth()
    for model, num_heads, num_kv_heads, has_norm in (("qwen2.5-7b", 28, 4, False), ("qwen3-0.6b", 16, 8, True)):
        all_heads = num_heads + 2 * num_kv_heads
        table = torch.randn(40960, 2, HEAD_DIM, device="cuda").bfloat16()
        norm = torch.randn(num_heads + num_kv_heads, HEAD_DIM, device="cuda").bfloat16() if has_norm else None
        for rows in (1, 64, 256, 8192, 32768):
            blocks = max(rows // BLOCK_SIZE, 16)
            pool = torch.zeros(
                blocks, NUM_LAYERS, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
            )
            written = all_heads + num_kv_heads  # k twice
            moved = 2 * rows * (all_heads + written) * HEAD_DIM + 2 * rows * HEAD_DIM  # and half a row of the table
            count = num_input_sets(moved, 32)
            sets = [torch.randn(rows, all_heads, HEAD_DIM, device="cuda").bfloat16() for _ in range(count)]
            slots = torch.randperm(blocks * BLOCK_SIZE, device="cuda")[:rows]
            positions = torch.randperm(40960, device="cuda")[:rows]
            ours = [
                functools.partial(rope_and_write_kv, s, table, positions, slots, norm, 1e-6, pool, i % NUM_LAYERS)
                for i, s in enumerate(sets)
            ]
            eager = [
                functools.partial(eager_rope, s, table, positions, slots, norm, pool, i % NUM_LAYERS)
                for i, s in enumerate(sets)
            ]
            if options.sweep:
                for option in TUNINGS:
                    seconds = graph_seconds([functools.partial(call, config=RopeConfig(*option)) for call in ours])
                    shape = f"{model} {rows} {'x'.join(map(str, option))}"
                    report("rope sweep", shape, us=seconds * 1e6, of_copy=moved / seconds / copy)
                continue
            report_against_copy("rope", f"{model} {rows}", ours, eager, moved, copy)


if __name__ == "__main__":
    main()
