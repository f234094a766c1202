"""Blocks whose GEMMs take quantized inputs (fp8, w8a8, int8-weight): norms and the gate quantize what they write.

    residual += pending output, normed, quantized    one kernel
    SiLU(gate) * up, quantized                       one kernel; with few rows the GEMM gates, a small one quantizes

The plain form would store each GEMM's input and quantize it in a kernel of its own.
"""

from __future__ import annotations

from torch import Tensor

from engine.gpu.ops.plain import AddRmsNorm, embed
from engine.gpu.ops.target import GpuStep, Target, no_op
from engine.gpu.quantized import EightBitLinear, QuantizedInput
from engine.layers.attention import Attention
from engine.layers.block import Block
from engine.layers.forward import BlockOp, Forward, Op
from engine.layers.linear import LinearLayer
from engine.layers.mlp import Mlp
from engine.models.model import Model
from kernels.gpu.rounding import norm_codes


class QuantizedInputOps:
    """Takes models all of whose qkv, gate_up and down have inputs of one type, up to its number of rows."""

    def __init__(self, model: Model) -> None:
        self._model = model
        kinds: set[type] = {type(layer) for block in model.blocks for layer in quantized_layers(block)}
        kind = kinds.pop()
        self.max_rows = kind.max_quantized_rows if not kinds and issubclass(kind, EightBitLinear) else 0

    def takes(self, target: Target) -> bool:
        return target.num_rows <= self.max_rows

    def lower(self, target: Target) -> Forward[GpuStep]:
        model = self._model
        final = AddRmsNorm(model.final_norm, model.config.rms_norm_eps)
        return Forward(embed(model), [op_of(block) for block in model.blocks], final, model.head)


def quantized_layers(block: Block) -> tuple[LinearLayer, ...]:
    """The layers whose inputs this form quantizes in the kernel before."""
    if isinstance(block, Attention):
        return (block.qkv,)
    if isinstance(block, Mlp):
        return block.gate_up, block.down
    raise no_op(block)


def op_of(block: Block) -> Op[GpuStep]:
    if isinstance(block, Attention):
        qkv = eight_bit(block.qkv)
        return BlockOp(AddNormQuantize(block, qkv), QuantizedInputAttention(block, qkv))
    if isinstance(block, Mlp):
        gate_up = eight_bit(block.gate_up)
        return BlockOp(AddNormQuantize(block, gate_up), QuantizedInputMlp(block, gate_up))
    raise no_op(block)


class AddNormQuantize:
    """`AddNorm` whose result is quantized as `reader` wants it."""

    def __init__(self, block: Block, reader: EightBitLinear) -> None:
        self._weight, self._eps = block.norm, block.eps
        self._dtype, self._num_planes = reader.dtype, reader.num_planes

    def __call__(self, residual: Tensor, pending: Tensor | None) -> QuantizedInput:
        return norm_codes(pending, residual, self._weight, self._eps, self._dtype, self._num_planes)


class QuantizedInputAttention:
    def __init__(self, block: Attention, qkv: EightBitLinear) -> None:
        self._block = block
        self._qkv = qkv
        self._dtype = block.norm.dtype

    def __call__(self, x: QuantizedInput, step: GpuStep) -> Tensor:
        qkv = self._qkv.gemm(*x, self._dtype)
        heads = qkv.view(qkv.shape[0], -1, self._block.head_dim)
        return self._block.output(step.attend(self._block, heads))


class QuantizedInputMlp:
    def __init__(self, block: Mlp, gate_up: EightBitLinear) -> None:
        self._gate_up = gate_up
        self._down = eight_bit(block.down)
        self._dtype = block.norm.dtype

    def __call__(self, x: QuantizedInput, step: GpuStep) -> Tensor:
        return self._down.gemm(*self._gate_up.gated_gemm(*x, self._dtype), self._dtype)


def eight_bit(layer: LinearLayer) -> EightBitLinear:
    assert isinstance(layer, EightBitLinear), "the form was chosen for 8-bit weights"
    return layer
