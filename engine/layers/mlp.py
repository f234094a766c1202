"""Gated MLP: y = W_down (silu(W_gate x) * W_up x), gate and up in one GEMM."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from engine.layers.block import Block, LinearRef, Step, take_linear
from engine.layers.linear import Linear
from engine.layers.weights import Partition, WeightSource
from engine.models.config import ModelConfig
from kernels.elementwise import silu_mul


class Mlp(Block):
    """The dense feed-forward block. is_gelu: GELU instead of SiLU."""

    is_gelu = False

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str, norm: str) -> None:
        self.eps = config.rms_norm_eps
        self.norm = weights.take(f"{norm}.weight", (config.hidden_size,))
        names = (f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj")
        gate_up, down = take_gated(weights, names, config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.gate_up: Linear = gate_up
        self.down: Linear = down

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))

    def linears(self) -> Iterator[LinearRef]:
        yield LinearRef(self, "gate_up")
        yield LinearRef(self, "down")


def take_gated(
    weights: WeightSource, names: tuple[str, str, str], hidden: int, inner: int, bias: bool = False,
    is_divided: bool = True,
) -> tuple[Linear, Linear]:  # fmt: skip
    """Return the layers gate_up and down. names: gate, up, down. is_divided: `inner` is divided among ranks."""
    gate, up, down = names
    columns, rows = (Partition.COLUMNS, Partition.ROWS) if is_divided else (Partition.NONE, Partition.NONE)
    return (
        take_linear(weights, [gate, up], [inner, inner], hidden, bias, columns),
        take_linear(weights, [down], [hidden], inner, bias, rows),
    )
