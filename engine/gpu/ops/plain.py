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

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from engine.gpu.ops.form import (
    Form,
    GpuBody,
    GpuStep,
    Target,
    add_norm,
    by_kind,
    embed,
    embed_then,
    final_norm,
    ops_of,
    post_norms,
)
from engine.layers.attention import Attention
from engine.layers.forward import Forward, Op
from engine.layers.linear import Linear
from engine.layers.mlp import GeluMlp, Mlp
from engine.layers.post_norm import without_post_norm
from engine.models.model import Model
from engine.moe.gpu_experts import StackedExperts, moe
from engine.moe.moe import Moe
from kernels.gpu.elementwise.silu_mul import silu_mul
from kernels.gpu.gemm.gated_gemm import gated_linear
from kernels.gpu.gemm.gemv import gemv
from kernels.gpu.gemm.skinny_gemm import skinny_gemm
from kernels.gpu.gemm.split_k import SplitKWorkspace
from kernels.gpu.launching.tuning import FUSED_GEMV, GEMV, SKINNY, SKINNY_GATED

Gemm = Callable[[Tensor], Tensor]


class PlainForm(Form):
    """Takes every step. Its workspace serves one stream."""

    sums_experts = False  # blocks of experts leave their sum, else partial sums

    def __init__(self, model: Model, experts: Mapping[int, StackedExperts]) -> None:
        """experts: of each block of experts, by its id."""
        super().__init__(model)
        self._workspace = SplitKWorkspace(model.embedding.device)
        self._experts = experts

    def takes(self, target: Target) -> bool:
        return True

    def bodies(self, num_rows: int) -> list[GpuBody]:
        """Bodies of all blocks."""
        rows, workspace = num_rows, self._workspace
        return [
            by_kind(
                without_post_norm(block),
                lambda block: attention(block, rows, workspace),
                lambda block: mlp(block, rows, workspace),
                lambda block: self.experts(block, rows),
                lambda block: ops_of(block).plain(block, rows, workspace),
            )
            for block in self.model.blocks
        ]

    def experts(self, block: Moe, num_rows: int) -> GpuBody:
        """The body of a block of experts."""
        return experts(block, self._experts[id(block)], num_rows, self._workspace, self.sums_experts)

    def lower(self, target: Target) -> Forward[GpuStep]:
        model, bodies = self.model, self.bodies(target.num_rows)
        triples = zip(model.blocks, post_norms(model)[:-1], bodies, strict=True)
        ops = [Op(add_norm(block.norm, block.eps, post_norm), body) for block, post_norm, body in triples]
        if model.embedding_scale is not None:
            return Forward(embed(model), ops, final_norm(model), model.head)
        return Forward(embed_then(model, bodies[0]), ops[1:], final_norm(model), model.head)


def attention(block: Attention, num_rows: int, workspace: SplitKWorkspace) -> GpuBody:
    qkv, output = gemm(block.qkv, num_rows, workspace), gemm(block.output, num_rows, workspace)

    def body(x: Tensor, step: GpuStep) -> Tensor:
        return output(step.attend(block, qkv(x).view(x.shape[0], -1, block.head_dim)))

    return body


def mlp(block: Mlp, num_rows: int, workspace: SplitKWorkspace) -> GpuBody:
    gated = gated_gemm(block.gate_up, num_rows, workspace, isinstance(block, GeluMlp))
    down = gemm(block.down, num_rows, workspace)
    return lambda x, step: down(gated(x))


def experts(
    block: Moe, stacked: StackedExperts, num_rows: int, workspace: SplitKWorkspace, is_summed: bool
) -> GpuBody:  # fmt: skip
    """is_summed: see `moe`."""
    return moe(block, stacked, gemm(Linear(stacked.router, block.router_bias), num_rows, workspace), is_summed)


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
