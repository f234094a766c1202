"""Blocks of one decode row: norm, gate and residual are part of the GEMVs, so nothing is ever pending.

Plain weights alone. Four launches a layer and the rotation less than the plain form.
"""

from __future__ import annotations

from engine.gpu.ops.plain import AddRmsNorm, embed
from engine.gpu.ops.target import GpuStep, Target, no_op
from engine.layers.attention import Attention
from engine.layers.block import Block
from engine.layers.forward import Forward, Op, Stream
from engine.layers.linear import Linear, LinearLayer
from engine.layers.mlp import Mlp
from engine.models.model import Model
from kernels.gpu.small_m_gemm import FUSED_GEMV, gemv


class OneRowOps:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._is_plain = all(isinstance(ref.layer, Linear) for block in model.blocks for ref in block.linears())

    def takes(self, target: Target) -> bool:
        return self._is_plain and target.is_decode and target.num_rows == 1

    def lower(self, target: Target) -> Forward[GpuStep]:
        model = self._model
        final = AddRmsNorm(model.final_norm, model.config.rms_norm_eps)
        return Forward(embed(model), [op_of(block) for block in model.blocks], final, model.head)


def op_of(block: Block) -> Op[GpuStep]:
    if isinstance(block, Attention):
        return OneRowAttention(block)
    if isinstance(block, Mlp):
        return OneRowMlp(block)
    raise no_op(block)


class OneRowAttention:
    def __init__(self, block: Attention) -> None:
        self._block = block
        self._qkv = plain_linear(block.qkv)
        self._output = plain_linear(block.output)

    def __call__(self, stream: Stream, step: GpuStep) -> Stream:
        block, qkv, output = self._block, self._qkv, self._output
        heads = gemv(stream.residual, qkv.weight, qkv.bias, FUSED_GEMV, block.norm, block.eps)
        attended = step.attend(block, heads.view(1, -1, block.head_dim))
        gemv(attended, output.weight, output.bias, FUSED_GEMV, added_to=stream.residual)
        return stream


class OneRowMlp:
    def __init__(self, block: Mlp) -> None:
        self._block = block
        self._gate_up = plain_linear(block.gate_up)
        self._down = plain_linear(block.down)

    def __call__(self, stream: Stream, step: GpuStep) -> Stream:
        block, gate_up, down = self._block, self._gate_up, self._down
        x = gemv(
            stream.residual, gate_up.weight, gate_up.bias, FUSED_GEMV, block.norm, block.eps, is_gated=True
        )  # fmt: skip
        gemv(x, down.weight, down.bias, FUSED_GEMV, added_to=stream.residual)
        return stream


def plain_linear(layer: LinearLayer) -> Linear:
    assert isinstance(layer, Linear), "the form was chosen for plain weights"
    return layer
