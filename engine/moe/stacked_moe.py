"""gpt-oss' mixture of experts: the weights of all experts in one tensor, biases, a clamped activation.

    expert   g, u = W_gate_up x + b;  y = W_down ((u' + 1) g' sigmoid(alpha g')) + c
             g' = min(g, limit), u' = clamp(u, -limit, limit)

The weights are a softmax over the chosen experts' scores, which equals the softmax over all, normalized to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.weights import Partition, WeightSource
from engine.models.config import ModelConfig
from engine.moe.moe import Expert, Moe


@dataclass(slots=True)
class ClampedExpert(Expert):
    """One expert, see above."""

    alpha: float
    limit: float

    @property
    def gate(self) -> tuple[float, float]:
        return self.alpha, self.limit


class StackedMoe(Moe):
    """Router with a bias, and experts that are cut out of the checkpoint's stacked weights."""

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str, norm: str) -> None:
        moe = config.moe
        assert moe is not None, "the family's adapt_config sets it"
        count, hidden, inner = moe.num_experts, config.hidden_size, moe.intermediate_size
        self.eps = config.rms_norm_eps
        self.norm = weights.take(f"{norm}.weight", (hidden,))
        self.router = weights.take(f"{name}.router.weight", (count, hidden))
        self.router_bias = weights.take(f"{name}.router.bias", (count,))
        self.rule, self.num_chosen = moe, moe.num_experts_per_token
        names = f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj"
        is_divided = moe.expert_ranks == 1
        last, rows, once = (
            part if is_divided else Partition.NONE for part in (Partition.LAST, Partition.ROWS, Partition.ONCE)
        )
        gate_up = weights.take(names[0], (count, hidden, 2 * inner), last)
        gate_up_bias = weights.take(f"{names[0]}_bias", (count, 2 * inner), last)
        down = weights.take(names[1], (count, inner, hidden), rows)
        down_bias = weights.take(f"{names[1]}_bias", (count, hidden), once)
        self.experts = {
            slot: ClampedExpert(
                Linear(_rows_of(_halves(gate_up, expert, 1)), _halves(gate_up_bias, expert, 0), (names[0],)),
                Linear(_rows_of(_one(down, expert)), _one(down_bias, expert), (names[1],)),
                moe.swiglu_alpha,
                moe.swiglu_limit,
            )
            for slot, expert in ((slot, moe.expert_of(slot)) for slot in moe.held_slots)
        }
        if moe.slots:
            from engine.expert_parallel.slots import ExpertSlots

            self.slots = ExpertSlots(moe.slots, self.router.device)


def _one(stacked: Tensor, expert: int) -> Tensor:
    """Cut out one expert's weight. Tensors without storage are not computed, see `joined`."""
    return torch.empty(stacked.shape[1:], dtype=stacked.dtype, device="meta") if stacked.is_meta else stacked[expert]


def _halves(stacked: Tensor, expert: int, dim: int) -> Tensor:
    """Cut out one expert's gate and up, which alternate in dimension `dim`, and put one after the other."""
    weight = _one(stacked, expert)
    if weight.is_meta:
        return weight
    pairs = weight.view(*weight.shape[:dim], -1, 2)
    return pairs.transpose(dim, dim + 1).flatten(dim, dim + 1)


def _rows_of(weight: Tensor) -> Tensor:
    """Copy (in, out) to (out, in), so that the stacked weight can be freed."""
    if weight.is_meta:
        return torch.empty(weight.shape[::-1], dtype=weight.dtype, device="meta")
    return weight.t().clone(memory_format=torch.contiguous_format)
