"""Blocks of up to 64 decode rows of a small model: a GEMM's weights are on the chip before it starts.

GEMMs leave split-K partials (`kernels.gpu.gemm.preloaded_gemm`), which the kernels behind them add up: rotation,
norms, gate. With larger weights there is no room to bring them early, and with more rows x takes longer than they.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from engine.gpu.ops.form import Form, GpuBody, GpuStep, Target, by_kind, embed_then
from engine.gpu.ops.plain import Gemm
from engine.layers.attention import Attention
from engine.layers.forward import AddNorm, Forward, Op
from engine.layers.linear import Linear
from engine.layers.mlp import Mlp
from engine.models.model import Model
from kernels.gpu.elementwise.rms_norm import add_rms_norm_of_partials
from kernels.gpu.elementwise.silu_mul import silu_mul_of_partials
from kernels.gpu.gemm.preloaded_gemm import COLUMN_MULTIPLE, fits_preloaded, preloaded_linear
from kernels.gpu.launching.launch_configs import PreloadedConfig
from kernels.gpu.launching.tuning import PRELOADED, SPREAD_ROWS

MAX_HIDDEN = 2048


class SplitKForm(Form):
    def __init__(self, model: Model) -> None:
        super().__init__(model)
        fits = model.config.hidden_size <= MAX_HIDDEN and fits_preloaded(model.embedding.device)
        self._layers = [ref.layer for block in model.blocks for ref in block.linears()] if fits else []

    def takes(self, target: Target) -> bool:
        """Whether all GEMMs of so many rows have a configuration."""
        if not (target.is_decode and self._layers):
            return False
        return all(config_of(layer, target.num_rows) is not None for layer in self._layers)

    def lower(self, target: Target) -> Forward[GpuStep]:
        model, rows = self.model, target.num_rows
        bodies = [
            by_kind(block, lambda block: attention(block, rows), lambda block: mlp(block, rows))
            for block in model.blocks
        ]
        pairs = zip(model.blocks[1:], bodies[1:], strict=True)
        ops = [Op(add_partials_norm(block.norm, block.eps), body) for block, body in pairs]
        final = add_partials_norm(model.final_norm, model.config.rms_norm_eps)
        return Forward(embed_then(model, bodies[0]), ops, final, model.head)


def add_partials_norm(weight: Tensor, eps: float) -> AddNorm[Tensor]:
    """In one kernel."""

    def fold(residual: Tensor, pending: Tensor | None) -> Tensor:
        assert pending is not None, "the stream starts with a pending output"
        return add_rms_norm_of_partials(pending, residual, weight, eps)

    return fold


def attention(block: Attention, num_rows: int) -> GpuBody:
    qkv, output, spreads_next = gemm(block.qkv, num_rows), gemm(block.output, num_rows), num_rows > SPREAD_ROWS

    def body(x: Tensor, step: GpuStep) -> Tensor:
        partials = qkv(x)
        heads = partials.view(*partials.shape[:2], -1, block.head_dim)
        return output(step.attend(block, heads, spreads_next))

    return body


def mlp(block: Mlp, num_rows: int) -> GpuBody:
    gate_up, down = gemm(block.gate_up, num_rows), gemm(block.down, num_rows)
    return lambda x, step: down(silu_mul_of_partials(gate_up(x)))


def gemm(layer: Linear, num_rows: int) -> Gemm:
    """(num_rows, in) -> partials (num_splits, num_rows, out)."""
    config = config_of(layer, num_rows)
    assert config is not None, "the form was chosen for these shapes"
    return partial(preloaded_linear, weight=layer.weight, bias=layer.bias, config=config)


def config_of(layer: Linear, num_rows: int) -> PreloadedConfig | None:
    if not layer.is_16_bit or layer.weight.shape[1] % COLUMN_MULTIPLE:
        return None
    n, k = layer.weight.shape
    return PRELOADED.find(num_rows, n, k)
