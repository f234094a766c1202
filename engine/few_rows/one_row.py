"""Blocks of one decode row: norm, gate and residual are fused into the GEMVs, so no output is ever pending.

For plain weights. All blocks of a model take these ops, or none does, since an op expects nothing pending.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from engine.gpu.ops.rules import GpuOp, GpuStep, Pending, Rule, Target
from engine.layers.attention import Attention
from engine.layers.block import Block
from engine.layers.forward import Op
from engine.layers.linear import Linear
from engine.layers.mlp import Mlp
from kernels.gpu.few_rows.few_row_tuning import FUSED_GEMV
from kernels.gpu.few_rows.gemv import gemv
from kernels.gpu.tuning import found

ONE_ROW = "one row"


def attention(block: Attention, target: Target) -> GpuOp:
    qkv, output = bound_gemv(block.qkv), bound_gemv(block.output)

    def body(residual: Tensor, step: GpuStep) -> None:
        heads = qkv(residual, norm=block.norm, eps=block.eps).view(1, -1, block.head_dim)
        output(step.attend(block, heads), added_to=residual)

    return Op(nothing_pending, body)


def mlp(block: Mlp, target: Target) -> GpuOp:
    gate_up, down = bound_gemv(block.gate_up), bound_gemv(block.down)

    def body(residual: Tensor, step: GpuStep) -> None:
        gated = gate_up(residual, norm=block.norm, eps=block.eps, is_gated=True, is_gelu=block.is_gelu)
        down(gated, added_to=residual)

    return Op(nothing_pending, body)


def nothing_pending(residual: Tensor, pending: Pending | None) -> Tensor:
    """Return the residual as it is, since the body norms it."""
    return residual


def bound_gemv(layer: Linear) -> partial[Tensor]:
    config = found(FUSED_GEMV.find(1, *layer.weight.shape))
    return partial(gemv, weight=layer.weight, bias=layer.bias, config=config)


def is_one_row(block: Block, target: Target) -> bool:
    """Whether the step is one decode row of a model on one rank."""
    return target.num_rows == 1 and target.is_decode and target.seams.is_alone


def is_plain_row(block: Block, target: Target) -> bool:
    return is_one_row(block, target) and all(ref.layer.is_plain for ref in block.linears())


RULES = Rule(Attention, attention, is_plain_row, ONE_ROW), Rule(Mlp, mlp, is_plain_row, ONE_ROW)
