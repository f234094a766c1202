"""Blocks of one decode row: norm, gate and residual are part of the GEMVs, so nothing is ever pending."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from engine.gpu.ops.form import Form, GpuOp, GpuStep, Target, by_kind, embed, final_norm, ops_of
from engine.layers.attention import Attention
from engine.layers.forward import Forward, Op
from engine.layers.linear import Linear
from engine.layers.mlp import GeluMlp, Mlp
from engine.layers.post_norm import PostNormed
from engine.models.model import Model
from engine.moe.gpu_experts import StackedExperts, moe_of_row
from engine.moe.moe import Moe
from kernels.gpu.gemm.gemv import gemv
from kernels.gpu.launching.tuning import FUSED_GEMV


class OneRowForm(Form):
    """Plain weights alone, and no norms behind blocks; experts of any format, whose kernels take a row as it is."""

    def __init__(self, model: Model, experts: Mapping[int, StackedExperts]) -> None:
        """experts: of each block of experts, by its id."""
        super().__init__(model)
        self._experts = experts

    def takes(self, target: Target) -> bool:
        return (
            target == Target(1, is_decode=True)
            and all(
                ref.layer.is_plain
                for block in self.model.blocks
                if not isinstance(block, Moe)
                for ref in block.linears()
            )
            and not any(isinstance(block, PostNormed) for block in self.model.blocks)
        )  # fmt: skip

    def lower(self, target: Target) -> Forward[GpuStep]:
        ops = [
            by_kind(
                block,
                attention,
                mlp,
                lambda block: experts(block, self._experts[id(block)]),
                lambda block: ops_of(block).one_row(block),
            )
            for block in self.model.blocks
        ]
        return Forward(embed(self.model), ops, final_norm(self.model), self.model.head)


def attention(block: Attention) -> GpuOp:
    qkv, output = bound_gemv(block.qkv), bound_gemv(block.output)

    def body(residual: Tensor, step: GpuStep) -> None:
        heads = qkv(residual, norm=block.norm, eps=block.eps).view(1, -1, block.head_dim)
        output(step.attend(block, heads), added_to=residual)

    return Op(nothing_pending, body)


def mlp(block: Mlp) -> GpuOp:
    gate_up, down, is_gelu = bound_gemv(block.gate_up), bound_gemv(block.down), isinstance(block, GeluMlp)

    def body(residual: Tensor, step: GpuStep) -> None:
        gated = gate_up(residual, norm=block.norm, eps=block.eps, is_gated=True, is_gelu=is_gelu)
        down(gated, added_to=residual)

    return Op(nothing_pending, body)


def experts(block: Moe, stacked: StackedExperts) -> GpuOp:
    logits_type = torch.float32 if block.rule.float32_router else block.norm.dtype
    router = Linear(stacked.router, block.router_bias)
    add = moe_of_row(
        block, stacked, partial(bound_gemv(router), norm=block.norm, eps=block.eps, out_dtype=logits_type)
    )  # fmt: skip
    return Op(nothing_pending, add)


def nothing_pending(residual: Tensor, pending: Tensor | None) -> Tensor:
    """The body norms the residual itself."""
    return residual


def bound_gemv(layer: Linear) -> partial[Tensor]:
    return partial(gemv, weight=layer.weight, bias=layer.bias, config=FUSED_GEMV)
