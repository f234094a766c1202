"""Blocks of up to 64 decode rows of a small model: a GEMM's weights are on the chip before it starts.

GEMMs leave split-K partials (`kernels.gpu.preloaded_gemm`), which the kernels behind them add up: rotation, norms,
gate. With larger weights there is no room to bring them early, and with more rows x takes longer than they.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from engine.gpu.ops.plain import Gemm, embed_then
from engine.gpu.ops.target import GpuStep, Target, no_op
from engine.layers.attention import Attention
from engine.layers.block import Block
from engine.layers.forward import BlockOp, Body, Forward
from engine.layers.linear import Linear, LinearLayer
from engine.layers.mlp import Mlp
from engine.models.model import Model
from kernels.gpu.parts import add_rms_norm_of_parts, silu_mul_of_parts
from kernels.gpu.preloaded_gemm import FEW_ROWS, PreloadedConfig, choose_preloaded, fits_preloaded, preloaded_linear

MAX_HIDDEN = 2048


class SplitKOps:
    def __init__(self, model: Model) -> None:
        self._model = model
        fits = model.config.hidden_size <= MAX_HIDDEN and fits_preloaded(model.embedding.device)
        self._layers = [ref.layer for block in model.blocks for ref in block.linears()] if fits else []

    def takes(self, target: Target) -> bool:
        """Whether all GEMMs of so many rows have a configuration."""
        if not (target.is_decode and self._layers):
            return False
        return all(config_of(layer, target.num_rows) is not None for layer in self._layers)

    def lower(self, target: Target) -> Forward[GpuStep]:
        model = self._model
        bodies = [body_of(block, target.num_rows) for block in model.blocks]
        ops = [
            BlockOp(AddPartialsNorm(block.norm, block.eps), body)
            for block, body in zip(model.blocks[1:], bodies[1:], strict=True)
        ]
        final = AddPartialsNorm(model.final_norm, model.config.rms_norm_eps)
        return Forward(embed_then(model, bodies[0]), ops, final, model.head)


class AddPartialsNorm:
    """`AddNorm` of pending split-K partials, in one kernel."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, residual: Tensor, pending: Tensor | None) -> Tensor:
        assert pending is not None, "the stream starts with a pending output"
        return add_rms_norm_of_parts(pending, residual, self._weight, self._eps)


def body_of(block: Block, num_rows: int) -> Body[Tensor, GpuStep]:
    if isinstance(block, Attention):
        return SplitKAttention(block, num_rows)
    if isinstance(block, Mlp):
        return SplitKMlp(block, num_rows)
    raise no_op(block)


class SplitKAttention:
    def __init__(self, block: Attention, num_rows: int) -> None:
        self._block = block
        self._qkv = gemm(block.qkv, num_rows)
        self._output = gemm(block.output, num_rows)
        self._spreads_next = num_rows > FEW_ROWS

    def __call__(self, x: Tensor, step: GpuStep) -> Tensor:
        qkv = self._qkv(x)
        heads = qkv.view(*qkv.shape[:2], -1, self._block.head_dim)
        return self._output(step.attend(self._block, heads, self._spreads_next))


class SplitKMlp:
    def __init__(self, block: Mlp, num_rows: int) -> None:
        self._gate_up = gemm(block.gate_up, num_rows)
        self._down = gemm(block.down, num_rows)

    def __call__(self, x: Tensor, step: GpuStep) -> Tensor:
        return self._down(silu_mul_of_parts(self._gate_up(x)))


def gemm(layer: LinearLayer, num_rows: int) -> Gemm:
    """(num_rows, in) -> partials (num_splits, num_rows, out)."""
    config = config_of(layer, num_rows)
    assert config is not None, "the form was chosen for these shapes"
    assert isinstance(layer, Linear)
    return partial(preloaded_linear, weight=layer.weight, bias=layer.bias, config=config)


def config_of(layer: LinearLayer, num_rows: int) -> PreloadedConfig | None:
    if not isinstance(layer, Linear) or layer.weight.dtype.itemsize != 2:
        return None
    return choose_preloaded(num_rows, *layer.weight.shape)
