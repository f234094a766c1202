"""Blocks whose GEMMs take quantized inputs (fp8, w8a8, int8-weight): norms and the gate quantize what they write.

    residual += pending output, normed, quantized    one kernel
    SiLU(gate) * up, quantized                       one kernel; with few rows the GEMM gates, a small one quantizes
    experts                                          as in the plain form, whose partial sums that one kernel adds

The plain form would store each GEMM's input and quantize it in a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from engine.gpu.ops.form import Form, GpuOp, GpuStep, Target, add_norm, by_kind, embed, final_norm
from engine.gpu.ops.plain import experts
from engine.layers.attention import Attention
from engine.layers.block import Block
from engine.layers.forward import AddNorm, Forward, Op, Stream
from engine.layers.linear import Linear
from engine.layers.mlp import Mlp
from engine.models.model import Model
from engine.moe.gpu_experts import StackedExperts
from engine.moe.moe import Moe
from engine.quantization.gpu_linears import EightBit, QuantizedInput
from kernels.gpu.gemm.split_k import SplitKWorkspace
from kernels.gpu.quantization.quantize import add_rms_norm_quantize


class QuantizedInputForm(Form):
    """Takes models all of whose qkv, gate_up and down have inputs of one type, up to its number of rows.

    Experts' weights may have any: their inputs stay as they are.
    """

    def __init__(self, model: Model, experts: Mapping[int, StackedExperts] | None = None) -> None:
        """experts: of each block of experts, by its id."""
        super().__init__(model)
        self._experts = experts or {}
        self._workspace = SplitKWorkspace(model.embedding.device) if experts else None
        kinds: set[object] = set()
        for block in model.blocks:
            readers = by_kind(
                block, lambda block: (block.qkv,), lambda block: (block.gate_up, block.down), lambda block: ()
            )
            kinds.update(layer.gemm if layer.order is None else None for layer in readers)
        kind = kinds.pop()
        self.max_rows = kind.max_quantized_rows if not kinds and isinstance(kind, EightBit) else 0

    @staticmethod
    def knows(model: Model) -> bool:
        """Whether it has ops for all blocks, of exactly these kinds."""
        return all(type(block) in (Attention, Mlp, Moe) for block in model.blocks)

    def takes(self, target: Target) -> bool:
        return target.num_rows <= self.max_rows

    def lower(self, target: Target) -> Forward[GpuStep]:
        moe = partial(self._moe, num_rows=target.num_rows)
        ops = [by_kind(block, self._attention, self._mlp, moe) for block in self.model.blocks]
        return Forward(self.start(), ops, self.final_norm(), self.model.head)

    def start(self) -> Callable[[GpuStep], Stream]:
        return embed(self.model)

    def final_norm(self) -> AddNorm[Tensor]:
        return final_norm(self.model)

    def add_norm_quantize(self, block: Block, reader: EightBit) -> AddNorm[QuantizedInput]:
        """In one kernel, to the type of values that `reader` takes."""

        def fold(residual: Tensor, pending: Tensor | None) -> QuantizedInput:
            return add_rms_norm_quantize(pending, residual, block.norm, block.eps, reader.dtype, reader.num_planes)

        return fold

    def _attention(self, block: Attention) -> GpuOp:
        qkv, dtype = eight_bit(block.qkv), block.norm.dtype

        def body(x: QuantizedInput, step: GpuStep) -> Tensor:
            heads = qkv.multiply(block.qkv, *x, dtype)
            return block.output(step.attend(block, heads.view(heads.shape[0], -1, block.head_dim)))

        return Op(self.add_norm_quantize(block, qkv), body)

    def _mlp(self, block: Mlp) -> GpuOp:
        gate_up, down, dtype = eight_bit(block.gate_up), eight_bit(block.down), block.norm.dtype

        def body(x: QuantizedInput, step: GpuStep) -> Tensor:
            return down.multiply(block.down, *gate_up.multiply_gated(block.gate_up, *x, dtype), dtype)

        return Op(self.add_norm_quantize(block, gate_up), body)

    def _moe(self, block: Moe, num_rows: int) -> GpuOp:
        """With inputs of 16 bits. num_rows: see `Target`."""
        assert self._workspace is not None, "the model has experts"
        body = experts(block, self._experts[id(block)], num_rows, self._workspace, is_summed=False)
        return Op(add_norm(block.norm, block.eps), body)


def eight_bit(layer: Linear) -> EightBit:
    assert isinstance(layer.gemm, EightBit), "the form was chosen for 8-bit weights"
    return layer.gemm
