"""Ops of attention and MLPs for any number of rows: one kernel for each GEMM, and fused kernels between GEMMs.

Skinny GEMMs use a kernel of `engine/few_rows` where it was measured to be faster; others use cuBLAS, or the kernel of
the quantized layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.wings import has_wing
from engine.gpu.ops.rules import GpuOp, GpuStep, Rule, Target
from engine.layers.attention import Attention
from engine.layers.forward import Op
from engine.layers.linear import Linear, LinearLayer
from engine.layers.mlp import Mlp
from kernels.gpu.elementwise.silu_mul import silu_mul

HAS_FEW_ROWS = has_wing("engine.few_rows")
if HAS_FEW_ROWS:
    from engine.few_rows import gemms
    from kernels.gpu.few_rows.split_k import SplitKWorkspace


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


def workspace_on(device: torch.device) -> Any:
    """Allocate the workspace that consecutive GEMMs of one stream share; None if they need none."""
    return SplitKWorkspace(device) if HAS_FEW_ROWS else None


def gemm(layer: Linear, num_rows: int, workspace: Any) -> LinearLayer:
    """(num_rows, in) -> (num_rows, out)."""
    return (gemms.gemm(layer, num_rows, workspace) if HAS_FEW_ROWS else None) or layer


def gated_gemm(gate_up: Linear, num_rows: int, workspace: Any, is_gelu: bool = False) -> LinearLayer:
    """(num_rows, in) -> silu(gate) * up, (num_rows, out / 2). is_gelu: GELU instead."""
    if HAS_FEW_ROWS and (gated := gemms.gated_gemm(gate_up, num_rows, is_gelu)) is not None:
        return gated
    if (gated := gate_up.gated(num_rows, is_gelu)) is not None:
        return gated
    apart = gemm(gate_up, num_rows, workspace)
    return lambda x: silu_mul(apart(x), is_gelu)


RULES = Rule(Attention, attention), Rule(Mlp, mlp)
