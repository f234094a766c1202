"""Blocks of any number of rows: GEMMs apart, all between them fused.

    residual += pending output, normed       one kernel, also where the output is normed before it is added
    q, k normed and rotated, k and v stored  one kernel
    attention                                one kernel for decode rows, one for chunks of prompts
    SiLU(gate) * up, or GELU(gate) * up      one kernel, or part of the GEMM
    experts                                  routing, then two grouped GEMMs

A GEMM of few rows takes the kernel that reads weights fastest where that was measured to win
(`kernels.gpu.launching.tuning`), else cuBLAS, or the quantized layer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from engine.gpu.ops.rules import GpuOp, GpuStep, Rule, Target
from engine.layers.attention import Attention
from engine.layers.forward import Op
from engine.layers.linear import Linear
from engine.layers.mlp import Mlp
from kernels.gpu.elementwise.silu_mul import silu_mul
from kernels.gpu.gemm.gated_gemm import gated_linear
from kernels.gpu.gemm.gemv import gemv
from kernels.gpu.gemm.skinny_gemm import skinny_gemm
from kernels.gpu.gemm.split_k import SplitKWorkspace
from kernels.gpu.launching.tuning import FUSED_GEMV, GEMV, SKINNY, SKINNY_GATED

Gemm = Callable[[Tensor], Tensor]


def attention(block: Attention, target: Target) -> GpuOp:
    rows, workspace = target.num_rows, target.workspace
    qkv, output = gemm(block.qkv, rows, workspace), gemm(block.output, rows, workspace)

    def body(x: Tensor, step: GpuStep) -> Tensor:
        return output(step.attend(block, qkv(x).view(x.shape[0], -1, block.head_dim)))

    return Op(target.seams.fold(block.norm, block.eps), body)


def mlp(block: Mlp, target: Target) -> GpuOp:
    rows, workspace = target.num_rows, target.workspace
    gated, down = gated_gemm(block.gate_up, rows, workspace, block.is_gelu), gemm(block.down, rows, workspace)
    return Op(target.seams.fold(block.norm, block.eps), lambda x, step: down(gated(x)))


def gemm(layer: Linear, num_rows: int, workspace: SplitKWorkspace) -> Gemm:
    """(num_rows, in) -> (num_rows, out)."""
    if not layer.is_16_bit:
        return layer
    n, k = layer.weight.shape
    if num_rows == 1 and (row := GEMV.find(1, n, k)) is not None:
        return partial(gemv, weight=layer.weight, bias=layer.bias, config=row)
    config = SKINNY.find(num_rows, n, k)
    if config is None:
        return layer
    return partial(skinny_gemm, weight=layer.weight, bias=layer.bias, workspace=workspace, config=config)


def gated_gemm(gate_up: Linear, num_rows: int, workspace: SplitKWorkspace, is_gelu: bool = False) -> Gemm:
    """(num_rows, in) -> silu(gate) * up, (num_rows, out / 2). is_gelu: GELU instead."""
    if gate_up.is_16_bit:
        n, k = gate_up.weight.shape
        if num_rows == 1 and gate_up.bias is None:
            return partial(gemv, weight=gate_up.weight, bias=None, config=FUSED_GEMV, is_gated=True, is_gelu=is_gelu)
        config = SKINNY_GATED.find(num_rows, n // 2, k)
        if config is not None:
            return partial(gated_linear, weight=gate_up.weight, bias=gate_up.bias, config=config, is_gelu=is_gelu)
    apart = gemm(gate_up, num_rows, workspace)
    return lambda x: silu_mul(apart(x), is_gelu)


RULES = Rule(Attention, attention), Rule(Mlp, mlp)
