"""Blocks of up to 64 decode rows of a small model: a GEMM loads its weights to the chip before its input is ready.

GEMMs leave split-K partials (`kernels.gpu.few_rows.preloaded_gemm`), which the next kernels sum: rotation, norms,
gate. Larger weights do not fit on the chip that early, and with more rows x takes longer to load than the weights.
Measured in models all of whose GEMMs have a configuration.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from engine.few_rows.gemms import is_16_bit
from engine.few_rows.partials import Partials
from engine.gpu.ops.rules import GpuOp, GpuStep, Rule, Target
from engine.layers.attention import Attention
from engine.layers.forward import Op
from engine.layers.linear import Linear, LinearLayer
from engine.layers.mlp import Mlp
from kernels.gpu.few_rows.few_row_tuning import PRELOADED, SPREAD_ROWS
from kernels.gpu.few_rows.gemm_configs import PreloadedConfig
from kernels.gpu.few_rows.partials import silu_mul_of_partials
from kernels.gpu.few_rows.preloaded_gemm import COLUMN_MULTIPLE, fits_preloaded, preloaded_linear

MAX_HIDDEN = 2048
SPLIT_K = "split K"


def attention(block: Attention, target: Target) -> GpuOp:
    qkv, output = gemm(block.qkv, target.num_rows), gemm(block.output, target.num_rows)
    spreads_next = target.num_rows > SPREAD_ROWS

    def body(x: Tensor, step: GpuStep) -> Partials:
        partials = qkv(x)
        heads = partials.view(*partials.shape[:2], -1, block.head_dim)
        return Partials(output(step.attend(block, heads, spreads_next)))

    return Op(target.seams.fold(block.norm, block.eps), body)


def mlp(block: Mlp, target: Target) -> GpuOp:
    gate_up, down = gemm(block.gate_up, target.num_rows), gemm(block.down, target.num_rows)

    def body(x: Tensor, step: GpuStep) -> Partials:
        return Partials(down(silu_mul_of_partials(gate_up(x))))

    return Op(target.seams.fold(block.norm, block.eps), body)


def gemm(layer: Linear, num_rows: int) -> LinearLayer:
    """Return the GEMM (num_rows, in) -> partials (num_splits, num_rows, out)."""
    config = config_of(layer, num_rows)
    assert config is not None, "the rule fits these shapes"
    return partial(preloaded_linear, weight=layer.weight, bias=layer.bias, config=config)


def config_of(layer: Linear, num_rows: int) -> PreloadedConfig | None:
    if not is_16_bit(layer) or layer.weight.shape[1] % COLUMN_MULTIPLE:
        return None
    n, k = layer.weight.shape
    return PRELOADED.find(num_rows, n, k)


def fits(block: Attention | Mlp, target: Target) -> bool:
    if not (target.is_decode and target.seams.is_alone) or block.norm.shape[0] > MAX_HIDDEN:
        return False
    if not fits_preloaded(block.norm.device) or (isinstance(block, Mlp) and block.is_gelu):
        return False
    return all(config_of(ref.layer, target.num_rows) is not None for ref in block.linears())


RULES = Rule(Attention, attention, fits, SPLIT_K), Rule(Mlp, mlp, fits, SPLIT_K)
