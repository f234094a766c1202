"""Blocks of any number of rows: GEMMs apart, all between them fused.

    residual += pending output, normed       one kernel
    q, k normed and rotated, k and v stored  one kernel
    attention                                one kernel for decode rows, one for chunks of prompts
    SiLU(gate) * up                          one kernel, or part of the GEMM

A GEMM of few rows takes the kernel that reads weights fastest where that was measured to win
(`kernels.gpu.small_m_gemm.choose`), else cuBLAS, or the quantized layer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from engine.gpu.ops.target import GpuStep, Target, no_op
from engine.layers.attention import Attention
from engine.layers.block import Block
from engine.layers.forward import BlockOp, Body, Forward, Stream
from engine.layers.linear import Linear, LinearLayer
from engine.layers.mlp import Mlp
from engine.models.model import Model
from kernels.gpu.gated_gemm import choose_gated, gated_linear
from kernels.gpu.rms_norm import add_rms_norm, embed_rms_norm, rms_norm
from kernels.gpu.silu_mul import silu_mul
from kernels.gpu.small_m_gemm import SmallMWorkspace, choose, small_m_linear

Gemm = Callable[[Tensor], Tensor]


class PlainOps:
    """Takes every step. workspace: serves one stream."""

    def __init__(self, model: Model, workspace: SmallMWorkspace) -> None:
        self._model = model
        self._workspace = workspace

    def takes(self, target: Target) -> bool:
        return True

    def lower(self, target: Target) -> Forward[GpuStep]:
        model = self._model
        bodies = [body_of(block, target, self._workspace) for block in model.blocks]
        ops = [
            BlockOp(AddRmsNorm(block.norm, block.eps), body)
            for block, body in zip(model.blocks[1:], bodies[1:], strict=True)
        ]
        final = AddRmsNorm(model.final_norm, model.config.rms_norm_eps)
        return Forward(embed_then(model, bodies[0]), ops, final, model.head)


class AddRmsNorm:
    """`AddNorm` in one kernel."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, residual: Tensor, pending: Tensor | None) -> Tensor:
        if pending is None:
            return rms_norm(residual, self._weight, self._eps)
        return add_rms_norm(pending, residual, self._weight, self._eps)


def embed(model: Model) -> Callable[[GpuStep], Stream]:
    """Start with the embedding's rows."""

    def start(step: GpuStep) -> Stream:
        return Stream(functional.embedding(step.token_ids, model.embedding))

    return start


def embed_then(model: Model, first: Body[Tensor, GpuStep]) -> Callable[[GpuStep], Stream]:
    """Start with the first block's output pending: its norm and the embedding's rows are one kernel."""
    norm, eps = model.blocks[0].norm, model.blocks[0].eps

    def start(step: GpuStep) -> Stream:
        residual, x = embed_rms_norm(step.token_ids, model.embedding, norm, eps)
        return Stream(residual, first(x, step))

    return start


def body_of(block: Block, target: Target, workspace: SmallMWorkspace) -> Body[Tensor, GpuStep]:
    if isinstance(block, Attention):
        return PlainAttention(block, target, workspace)
    if isinstance(block, Mlp):
        return PlainMlp(block, target, workspace)
    raise no_op(block)


class PlainAttention:
    def __init__(self, block: Attention, target: Target, workspace: SmallMWorkspace) -> None:
        self._block = block
        self._qkv = gemm(block.qkv, target.num_rows, workspace)
        self._output = gemm(block.output, target.num_rows, workspace)

    def __call__(self, x: Tensor, step: GpuStep) -> Tensor:
        qkv = self._qkv(x).view(x.shape[0], -1, self._block.head_dim)
        return self._output(step.attend(self._block, qkv))


class PlainMlp:
    def __init__(self, block: Mlp, target: Target, workspace: SmallMWorkspace) -> None:
        self._gated = gated_gemm(block.gate_up, target.num_rows, workspace)
        self._down = gemm(block.down, target.num_rows, workspace)

    def __call__(self, x: Tensor, step: GpuStep) -> Tensor:
        return self._down(self._gated(x))


def gemm(layer: LinearLayer, num_rows: int, workspace: SmallMWorkspace) -> Gemm:
    """(num_rows, in) -> (num_rows, out)."""
    if not isinstance(layer, Linear) or layer.weight.dtype.itemsize != 2:
        return layer
    config = choose(num_rows, *layer.weight.shape)
    if config is None:
        return layer
    return partial(small_m_linear, weight=layer.weight, bias=layer.bias, workspace=workspace, config=config)


def gated_gemm(gate_up: LinearLayer, num_rows: int, workspace: SmallMWorkspace) -> Gemm:
    """(num_rows, in) -> silu(gate) * up, (num_rows, out / 2)."""
    if isinstance(gate_up, Linear):
        config = choose_gated(num_rows, gate_up.weight.shape[0] // 2, gate_up.weight.dtype)
        if config is not None:
            return partial(gated_linear, weight=gate_up.weight, bias=gate_up.bias, config=config)
    apart = gemm(gate_up, num_rows, workspace)
    return lambda x: silu_mul(apart(x))
