"""Prompts over latents, absorbed and expanded: microseconds of one layer from rotated queries to the heads' outputs.

    python -m benchmarks.kernels.attention.bench_latent_prefill [--shapes 2048:0,8192:0,2048:6144,512:8192] [--sweep]

A shape is the chunk's tokens and its context. `absorbed` is two batched GEMMs and `latent_prefill`; `expanded`
gathers latents, expands them and attends, `expanded fa3` with FlashAttention-3 where its package takes such heads.
tflop_per_s counts what the form computes; `ratio` is the absorbed form's time over this one's; `difference` that of
the outputs, relative; `chosen` what the rule takes. `--sweep` tries settings of our kernel, attention alone.
"""

from __future__ import annotations

import argparse
import functools
from itertools import product

import torch
from torch import Tensor

from benchmarks.kernels.timing import compile_ahead, graph_seconds, report, sweep
from engine.mla.config import LatentConfig
from engine.mla.gpu_expanded import ExpandedLatents, is_cheaper_expanded, open_flash
from engine.mla.gpu_latents import AbsorbedPlan, PagedLatents
from kernels.gpu.attention.prompt_tiles import prefill_tiles
from kernels.gpu.mla.expanded_prefill import TILE_M, expanded_prefill
from kernels.gpu.tuning import PrefillConfig

LATENT = LatentConfig(None, 512, 128, 64, 128)  # DeepSeek-V2-Lite has 16 heads
BLOCK_SIZE, NUM_LAYERS = 64, 2
SWEEP = [PrefillConfig(*options) for options in product((32, 64, 128), (4, 8), (1, 2, 3))]
NUM_SHOWN = 5


class Case:
    """Random inputs: the last `queries` tokens of a sequence of `length`. The pool's layers take turns."""

    def __init__(self, num_heads: int, queries: int, context: int) -> None:
        self.num_heads, self.queries, self.length = num_heads, queries, queries + context
        self.rank, rotated = LATENT.kv_lora_rank, LATENT.rope_head_dim
        plain, value = LATENT.nope_head_dim, LATENT.v_head_dim
        blocks = -(-self.length // BLOCK_SIZE)
        shape = (blocks, NUM_LAYERS, 1, 1, BLOCK_SIZE, self.rank + rotated)
        self.pool = random(*shape)
        self.table = torch.randperm(blocks, device="cuda").int()[None]
        self.q = random(queries, num_heads, plain + rotated)
        self.absorbed = random(queries, num_heads, self.rank + rotated)
        self.absorbed[..., self.rank :] = self.q[..., plain:]
        self.attended = random(queries, num_heads * self.rank)
        self.kv_b = random(num_heads * (plain + value), self.rank) / self.rank**0.5
        by_head = self.kv_b.view(num_heads, -1, self.rank)
        self.w_uk, self.w_uv = by_head[:, :plain], by_head[:, plain:]
        self.out = random(queries, num_heads, value)
        self.rows = [0, queries], [self.length]
        pairs = queries * context + queries * (queries + 1) // 2
        of_tokens = 2 * num_heads * self.rank * (plain + value)
        self.absorbed_flop = pairs * 2 * num_heads * (2 * self.rank + rotated) + queries * of_tokens
        self.expanded_flop = pairs * 2 * num_heads * (plain + rotated + value) + self.length * of_tokens

    def absorbed_seconds(self) -> float:
        backend = PagedLatents(self.num_heads, LATENT)
        plan = backend.plan(*self.rows, self.table)
        assert isinstance(plan, AbsorbedPlan)
        by_head = self.attended.view(self.queries, self.num_heads, self.rank).transpose(0, 1)

        def run(layer: int) -> None:
            q_nope = self.q[..., : LATENT.nope_head_dim].transpose(0, 1)
            torch.bmm(q_nope, self.w_uk, out=self.absorbed[..., : self.rank].transpose(0, 1))
            backend.prefill(self.absorbed, self.pool, layer, plan, self.attended)
            torch.bmm(by_head, self.w_uv.transpose(1, 2), out=self.out.transpose(0, 1))

        return graph_seconds([functools.partial(run, layer) for layer in range(NUM_LAYERS)])

    def expanded_seconds(self, backend: ExpandedLatents) -> float:
        plan = backend.plan_expanded(*self.rows, self.table)
        call = functools.partial(backend.attend, self.q, self.kv_b, self.pool, plan=plan, out=self.out)
        return graph_seconds([functools.partial(call, layer=layer) for layer in range(NUM_LAYERS)])

    def attention_seconds(self, config: PrefillConfig) -> float:
        """Time only our attention kernel."""
        kv = random(self.length, self.num_heads, LATENT.nope_head_dim + LATENT.v_head_dim)
        keys = random(self.length, LATENT.rope_head_dim)
        starts = torch.zeros(1, dtype=torch.int32, device="cuda")
        tiles = torch.tensor(prefill_tiles(*self.rows, 1, TILE_M), dtype=torch.int32, device="cuda")
        return graph_seconds([lambda: expanded_prefill(self.q, kv, keys, 0.07, starts, tiles, self.out, config)] * 2)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def compile_some(num_heads: int, configs: list[PrefillConfig]) -> None:
    sweep(configs, Case(num_heads, 256, 0).attention_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--shapes", default="2048:0,8192:0,2048:6144,512:8192")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    if options.sweep:
        compile_ahead(functools.partial(compile_some, options.heads), SWEEP)
    dims = LATENT.nope_head_dim, LATENT.rope_head_dim, LATENT.v_head_dim
    flash = open_flash("auto", dims, torch.bfloat16, torch.device("cuda"))
    for text in options.shapes.split(","):
        queries, context = map(int, text.split(":"))
        case = Case(options.heads, queries, context)
        shape = f"{options.heads} heads {queries} over {context}"
        if options.sweep:
            for time, config in sweep(SWEEP, case.attention_seconds)[:NUM_SHOWN]:
                report("expanded_prefill sweep", shape, config=str(config), us=time * 1e6)
            continue
        absorbed = case.absorbed_seconds()
        wanted = case.out.float()
        chosen = "expanded" if is_cheaper_expanded(LATENT, *case.rows) else "absorbed"
        rate = case.absorbed_flop / absorbed / 1e12
        report("latent_prefill", f"{shape} absorbed", us=absorbed * 1e6, tflop_per_s=rate, ratio=1.0, chosen=chosen)
        for name, forward in [("expanded", None), *([("expanded fa3", flash)] if flash else [])]:
            backend = ExpandedLatents(case.pool, options.heads, LATENT, torch.bfloat16, forward)
            time = case.expanded_seconds(backend)
            rate = case.expanded_flop / time / 1e12
            difference = float((case.out.float() - wanted).norm() / wanted.norm())
            figures = {"us": time * 1e6, "tflop_per_s": rate, "ratio": absorbed / time, "difference": difference}
            report("latent_prefill", f"{shape} {name}", **figures)


if __name__ == "__main__":
    main()
