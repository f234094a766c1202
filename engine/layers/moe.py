"""Mixture of experts: y = sum over the k likeliest experts e of p_e MLP_e(x), p = softmax(W_router x). Plain torch.

Each expert computes the tokens that chose it. Which those are is read on the host, so this is no block for a CUDA
graph; and a token's result does not depend on the tokens beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.block import Block, LinearRef, Step
from engine.layers.linear import LinearLayer
from engine.layers.mlp import take_gated
from engine.layers.weights import WeightSource
from engine.models.config import ModelConfig
from kernels.silu_mul import silu_mul


@dataclass(slots=True)
class Expert:
    """A gated MLP."""

    gate_up: LinearLayer
    down: LinearLayer

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))


class Moe(Block):
    """Router and experts. projections: what the checkpoint calls an expert's gate, up and down.

    router: (num_experts, hidden); never quantized, it is small and every choice hangs on it.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightSource, name: str, norm: str,
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:  # fmt: skip
        moe = config.moe
        assert moe is not None, "the family's adapt_config sets it"
        self.eps = config.rms_norm_eps
        self.norm = weights.take(f"{norm}.weight", (config.hidden_size,))
        self.router = weights.take(f"{name}.gate.weight", (moe.num_experts, config.hidden_size))
        self.num_chosen = moe.num_experts_per_token
        self.normalizes = moe.normalizes_weights
        gate, up, down = projections
        self.experts = []
        for index in range(moe.num_experts):
            expert = f"{name}.experts.{index}"
            names = (f"{expert}.{gate}", f"{expert}.{up}", f"{expert}.{down}")
            self.experts.append(Expert(*take_gated(weights, names, config.hidden_size, moe.intermediate_size)))

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        shares, chosen = self.route(x)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in sorted(set(chosen.flatten().tolist())):
            tokens, choices = torch.where(chosen == index)
            y = self.experts[index](x[tokens])
            out.index_add_(0, tokens, y * shares[tokens, choices, None])  # float32, as shares are
        return out.to(x.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares, float32, and indices of each token's experts: (num_tokens, num_chosen) each."""
        probabilities = functional.linear(x, self.router).softmax(dim=-1, dtype=torch.float32)
        shares, chosen = probabilities.topk(self.num_chosen, dim=-1)
        if self.normalizes:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares, chosen

    def linears(self) -> Iterator[LinearRef]:
        for index, expert in enumerate(self.experts):
            yield LinearRef(expert, "gate_up", f"experts.{index}.gate_up")
            yield LinearRef(expert, "down", f"experts.{index}.down")

    def copy(self) -> Self:
        block = super().copy()
        block.experts = [copy.copy(expert) for expert in self.experts]
        return block
