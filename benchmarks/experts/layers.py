"""The layers that `benchmarks.experts.parallel` measures, their rows, and the placement of their experts.

`options` are that program's arguments. All ranks draw the same weights, and place experts alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.dummy_weights.weights import DummyWeights
from engine.expert_balancing.placement import Slots, balanced_placement, first_placement
from engine.models.config import ModelConfig, RopeConfig
from engine.moe.config import MoeConfig
from engine.moe.moe import Moe
from kvstore.layout import WHOLE, Shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_PROFILED = 4096  # rows whose loads determine a balanced placement
COMMON = 8.0  # common part of all rows, which a skewed router reads


def make_block(
    options: argparse.Namespace, device: torch.device, routing: str, shard: Shard = WHOLE, slots: Slots = ()
) -> Moe:
    """Return a rank's experts of the layer; all ranks draw the same weights."""
    moe = MoeConfig(options.experts, options.top_k, options.inner, float32_router=True, slots=slots)  # without ties
    if shard != WHOLE:
        moe = moe.shard(shard.size, shard.rank, "dispatch")
    config = ModelConfig(
        architecture="Qwen3MoeForCausalLM", vocab_size=1, hidden_size=options.hidden, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=1, intermediate_size=options.inner, rms_norm_eps=1e-6, rope=RopeConfig(),
        max_position_embeddings=1, moe=moe,
    )  # fmt: skip
    block = Moe(config, DummyWeights(DTYPES[options.dtype], device, std=options.hidden**-0.5), "mlp", "norm")
    if routing == "skewed":
        skew(block)
    return block


def place_experts(whole: Moe, options: argparse.Namespace, device: torch.device) -> Slots:
    """Return the wanted placement; all ranks compute the same one."""
    if options.placement == "plain":
        return ()
    if options.placement == "rebalanced":
        return first_placement(options.experts, options.ranks, options.redundant)
    return profiled_placement(whole, options, device)


def profiled_placement(whole: Moe, options: argparse.Namespace, device: torch.device) -> Slots:
    """Return a placement balanced for the loads of rows that are not measured."""
    _, chosen = whole.route(make_rows(NUM_PROFILED, options.ranks, options, device))
    loads = torch.bincount(chosen.flatten(), minlength=options.experts).tolist()
    return balanced_placement(loads, options.ranks, options.redundant)


def imbalance_of(chosen: Sequence[Tensor], block: Moe) -> float:
    """Return the busiest rank's rows over the mean. chosen: slots of each rank's rows."""
    rule = block.rule
    of_slots = torch.bincount(torch.cat(list(chosen)).flatten(), minlength=rule.num_slots)
    of_ranks = of_slots.view(rule.expert_ranks, -1).sum(dim=1)
    return float(of_ranks.max() / of_ranks.float().mean())


def make_rows(num_rows: int, rank: int, options: argparse.Namespace, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x: Tensor = torch.randn(num_rows, options.hidden, generator=generator) + COMMON * options.hidden**-0.5
    return x.to(device, DTYPES[options.dtype])


def skew(block: Moe) -> None:
    """Lower expert e's score by log(e + 1), on average."""
    num_experts, hidden = block.router.shape
    offsets = -torch.log(torch.arange(1.0, num_experts + 1)) / COMMON
    skewed = block.router + (offsets[:, None] * hidden**-0.5).to(block.router)
    block.router = skewed.to(block.norm.dtype).to(skewed.dtype)
