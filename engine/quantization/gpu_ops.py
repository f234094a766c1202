"""Blocks whose GEMMs take quantized inputs (fp8, w8a8, int8-weight): norms and the gate write quantized outputs.

    residual += pending output, normed, quantized    one kernel
    SiLU(gate) * up, quantized                       one kernel; with few rows fused into the GEMM, then a small one

Plain ops would store each GEMM's input and quantize it in a separate kernel.
"""

from __future__ import annotations

from torch import Tensor

from engine.few_rows.partials import Partials
from engine.gpu.ops.rules import Fold, GpuOp, GpuStep, Pending, PendingOutput, Rule, Target
from engine.layers.attention import Attention
from engine.layers.forward import Op
from engine.layers.linear import Linear
from engine.layers.mlp import Mlp
from engine.models.model import Model
from engine.quantization.gpu_linears import EightBit, QuantizedInput
from kernels.gpu.quantization.quantize import add_rms_norm_quantize


def attention(block: Attention, target: Target) -> GpuOp:
    qkv, dtype = eight_bit(block.qkv), block.norm.dtype

    def body(x: QuantizedInput, step: GpuStep) -> Tensor:
        heads = qkv.multiply(block.qkv, *x, dtype)
        return block.output(step.attend(block, heads.view(heads.shape[0], -1, block.head_dim)))

    return Op(quantizing_fold(block.norm, block.eps, qkv, target), body)


def mlp(block: Mlp, target: Target) -> GpuOp:
    gate_up, down, dtype = eight_bit(block.gate_up), eight_bit(block.down), block.norm.dtype

    def body(x: QuantizedInput, step: GpuStep) -> Tensor:
        return down.multiply(block.down, *gate_up.multiply_gated(block.gate_up, *x, dtype), dtype)

    return Op(quantizing_fold(block.norm, block.eps, gate_up, target), body)


def quantizing_fold(weight: Tensor, eps: float, gemm: EightBit, target: Target) -> Fold[QuantizedInput]:
    """Return the fold that adds the pending output, norms the residual and quantizes it, in one kernel."""
    add_norm, is_alone = target.seams.add_norm_quantize or add_rms_norm_quantize, target.seams.is_alone

    def fold(residual: Tensor, pending: Pending | None) -> QuantizedInput:
        assert is_alone or isinstance(pending, Tensor), "a rank's output is its share of a sum"
        if isinstance(pending, Partials):
            pending = pending.values
        elif isinstance(pending, PendingOutput):
            pending = pending.plain(eps)
        return add_norm(pending, residual, weight, eps, gemm.dtype, gemm.num_planes)

    return fold


def eight_bit(layer: Linear) -> EightBit:
    assert isinstance(layer.gemm, EightBit), "the rule fits 8-bit weights"
    return layer.gemm


def are_eight_bit(target: Target, *readers: Linear) -> bool:
    """Whether the layers take quantized inputs of one type in steps of `target.num_rows` rows."""
    kinds = {layer.gemm if layer.order is None else None for layer in readers}
    kind = kinds.pop()
    return not kinds and isinstance(kind, EightBit) and target.num_rows <= kind.max_quantized_rows


def max_quantized_rows(model: Model) -> int:
    """Return the most rows for which any layer takes quantized inputs; 0: none ever does."""
    gemms = [ref.layer.gemm for block in model.blocks for ref in block.linears()]
    return max((gemm.max_quantized_rows for gemm in gemms if isinstance(gemm, EightBit)), default=0)


RULES = (
    Rule(Attention, attention, lambda block, target: are_eight_bit(target, block.qkv)),
    Rule(Mlp, mlp, lambda block, target: not block.is_gelu and are_eight_bit(target, block.gate_up, block.down)),
)
