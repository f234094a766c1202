"""Blocks of experts on a GPU: one decode row, and any number of rows (`engine/gpu/ops`).

Experts may have any format, since their kernels take inputs in 16 bits.
"""

from __future__ import annotations

from functools import partial

import torch

from engine.few_rows.one_row import ONE_ROW, bound_gemv, is_one_row, nothing_pending
from engine.gpu.ops.plain import gemm
from engine.gpu.ops.rules import GpuOp, Rule, Target
from engine.layers.forward import Op
from engine.layers.linear import Linear
from engine.moe.expert_stacks import prepare, stacked_of
from engine.moe.gpu_experts import moe, moe_of_row
from engine.moe.moe import Moe

__all__ = ["RULES", "prepare"]


def experts_of_row(block: Moe, target: Target) -> GpuOp:
    stacked = stacked_of(block)
    router = bound_gemv(Linear(stacked.router, block.router_bias))
    logits_type = torch.float32 if block.rule.float32_router else block.norm.dtype
    logits = partial(router, norm=block.norm, eps=block.eps, out_dtype=logits_type)
    return Op(nothing_pending, moe_of_row(block, stacked, logits))


def experts(block: Moe, target: Target) -> GpuOp:
    """Lower a block of experts. Its output is partial sums, or on a rank of several their sum."""
    stacked = stacked_of(block)
    router = gemm(Linear(stacked.router, block.router_bias), target.num_rows, target.workspace)
    is_summed = not target.seams.is_alone
    return Op(target.seams.fold(block.norm, block.eps), moe(block, stacked, router, is_summed))


RULES = Rule(Moe, experts_of_row, is_one_row, ONE_ROW), Rule(Moe, experts)
