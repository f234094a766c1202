"""Blocks of one decode row: norm, gate and residual are part of the GEMVs, so nothing is ever pending."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from engine.gpu.ops.form import Form, GpuOp, GpuStep, Target, by_kind, embed, final_norm
from engine.layers.attention import Attention
from engine.layers.forward import Forward, Op
from engine.layers.linear import Linear, LinearLayer
from engine.layers.mlp import Mlp
from kernels.gpu.gemv import gemv
from kernels.gpu.tuning import FUSED_GEMV


class OneRowForm(Form):
    """Plain weights alone."""

    def takes(self, target: Target) -> bool:
        return (
            target == Target(1, is_decode=True)
            and all(isinstance(ref.layer, Linear) for block in self.model.blocks for ref in block.linears())
        )  # fmt: skip

    def lower(self, target: Target) -> Forward[GpuStep]:
        ops = [by_kind(block, attention, mlp) for block in self.model.blocks]
        return Forward(embed(self.model), ops, final_norm(self.model), self.model.head)


def attention(block: Attention) -> GpuOp:
    qkv, output = bound_gemv(block.qkv), bound_gemv(block.output)

    def body(residual: Tensor, step: GpuStep) -> None:
        heads = qkv(residual, norm=block.norm, eps=block.eps).view(1, -1, block.head_dim)
        output(step.attend(block, heads), added_to=residual)

    return Op(nothing_pending, body)


def mlp(block: Mlp) -> GpuOp:
    gate_up, down = bound_gemv(block.gate_up), bound_gemv(block.down)

    def body(residual: Tensor, step: GpuStep) -> None:
        down(gate_up(residual, norm=block.norm, eps=block.eps, is_gated=True), added_to=residual)

    return Op(nothing_pending, body)


def nothing_pending(residual: Tensor, pending: Tensor | None) -> Tensor:
    """The body norms the residual itself."""
    return residual


def bound_gemv(layer: LinearLayer) -> partial[Tensor]:
    assert isinstance(layer, Linear), "the form was chosen for plain weights"
    return partial(gemv, weight=layer.weight, bias=layer.bias, config=FUSED_GEMV)
