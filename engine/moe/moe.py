"""Mixture of experts: y = sum over the chosen experts e of p_e MLP_e(x), and those of shared experts. Plain torch.

`engine/moe/routing.py` chooses the experts and their weights p.
Each expert computes the tokens that chose it. The host reads which tokens these are, so a CUDA graph cannot capture
the block. A token's result does not depend on the other tokens.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from engine.layers.block import Block, LinearRef, Step
from engine.layers.linear import Linear, two_rows_at_least
from engine.layers.mlp import take_gated
from engine.layers.weights import CHOICE_BIAS, WeightSource
from engine.models.config import ModelConfig
from engine.moe.routing import choose_experts
from kernels.expert_gate import SILU, gated

if TYPE_CHECKING:
    from engine.expert_parallel.slots import ExpertSlots


Together = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""x, shares and choices -> as `Moe.chosen_output`, or None where it does not take so many tokens."""


@dataclass(slots=True)
class Expert:
    """A gated MLP."""

    gate_up: Linear
    down: Linear

    @property
    def gate(self) -> tuple[float, float]:
        """alpha and limit of `gated`."""
        return SILU

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x), *self.gate))


class Moe(Block):
    """Router and experts. projections: the checkpoint's names for an expert's gate, up and down.

    experts: those of this rank, by slot, which is the expert's index unless there is a placement. router:
    (num_experts, hidden); never quantized, since it is small and all choices depend on it. router_bias:
    (num_experts,) or None. choice_bias: float32 (num_experts,) or None. shared: all shared experts as one, or None.
    shared_gate: (1, hidden) or None; its sigmoid is multiplied by the output of the shared experts. stacked: the
    experts in the layout of another device, once they are converted.
    """

    gpu_ops = "engine.moe.gpu_ops"

    router_bias: Tensor | None = None
    choice_bias: Tensor | None = None
    shared: Expert | None = None
    shared_gate: Tensor | None = None
    stacked: Any = None
    slots: ExpertSlots | None = None  # for a layer with a placement
    loads: Tensor | None = None  # int64 (num_experts,), counts the tokens of each expert, if they are counted

    def __init__(
        self, config: ModelConfig, weights: WeightSource, name: str, norm: str,
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:  # fmt: skip
        moe = config.moe
        assert moe is not None, "the family's adapt_config sets it"
        self.eps = config.rms_norm_eps
        self.norm = weights.take(f"{norm}.weight", (config.hidden_size,))
        self.router = weights.take(f"{name}.gate.weight", (moe.num_experts, config.hidden_size))
        if moe.float32_router and self.router.device.type != "meta":
            # float64 on a CPU: GEMMs in float32 sum up a row in an order that depends on the number of rows.
            self.router = self.router.double() if self.router.device.type == "cpu" else self.router.float()
        if moe.has_choice_bias:
            self.choice_bias = weights.take(f"{name}.gate.{CHOICE_BIAS}", (moe.num_experts,))
        self.rule = moe
        self.num_chosen = moe.num_experts_per_token
        gate, up, down = projections
        self.experts: dict[int, Expert] = {}
        for index in range(moe.num_experts):
            expert = f"{name}.experts.{index}"
            names = (f"{expert}.{gate}", f"{expert}.{up}", f"{expert}.{down}")
            linears = take_gated(
                weights, names, config.hidden_size, moe.intermediate_size, is_divided=moe.expert_ranks == 1
            )  # fmt: skip
            for slot in moe.held_slots:  # reads the other experts, too: all ranks must take the same weights
                if moe.expert_of(slot) == index:
                    self.experts[slot] = Expert(*linears)
        if moe.slots:
            from engine.expert_parallel.slots import ExpertSlots

            self.experts = dict(sorted(self.experts.items()))
            self.slots = ExpertSlots(moe.slots, self.router.device)
        if moe.num_shared_experts:
            shared = f"{name}.shared_expert" if moe.gates_shared else f"{name}.shared_experts"
            names = (f"{shared}.{gate}", f"{shared}.{up}", f"{shared}.{down}")
            is_divided = moe.exchange == "sum"
            self.shared = Expert(
                *take_gated(weights, names, config.hidden_size, moe.shared_size, is_divided=is_divided)
            )
            if moe.gates_shared:
                self.shared_gate = weights.take(f"{shared}_gate.weight", (1, config.hidden_size))

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        out = self.chosen_output(x, *self.route(x))
        self.add_shared_output_(out, x)
        return out.to(x.dtype)

    def add_shared_output_(self, out: Tensor, x: Tensor) -> None:
        """Add the output of the shared experts for x, if there are any, to out (num_tokens, hidden)."""
        if self.shared is None:
            return
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * two_rows_at_least(Linear(self.shared_gate), x).sigmoid()
        out += shared

    def chosen_output(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Sum up the outputs of the chosen experts that this rank has, float32 (num_tokens, hidden).

        shares: float32, the experts' weights; chosen: int64; (num_tokens, any number) each. Experts of other ranks,
        and -1, are left out.
        """
        if x.dtype == torch.bfloat16 and (at_once := self._together) is not None:
            of_few = at_once(x, shares, chosen)
            if of_few is not None:
                return of_few
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        by_expert, of_pairs, top_k = chosen.flatten(), shares.flatten(), chosen.shape[1]
        order = by_expert.argsort(stable=True)  # pairs of a token and a choice
        counts = Counter(by_expert.tolist())
        start = 0
        for index in sorted(counts):
            if index in self.experts:
                pairs = order[start : start + counts[index]]
                tokens = pairs // top_k
                y = self.experts[index](x[tokens])
                out.index_add_(0, tokens, y * of_pairs[pairs, None])  # float32, as shares are
            start += counts[index]
        return out

    @cached_property
    def _together(self) -> Together | None:
        """Return a function that computes few tokens by all experts, if their GEMM has one, with equal results."""
        linears = {index: (expert.gate_up, expert.down) for index, expert in self.experts.items()}
        kinds = {type(layer.gemm) for pair in linears.values() for layer in pair}
        make: Callable[..., Together | None] | None = (
            getattr(kinds.pop(), "together", None) if len(kinds) == 1 else None
        )
        return None if make is None else make(linears, *next(iter(self.experts.values())).gate)

    @property
    def needs_all_tokens(self) -> bool:
        return self.loads is not None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, float32, and slots of each token's experts: (num_tokens, num_chosen) each."""
        shares, chosen = choose_experts(self.router_logits(x), self.rule, self.choice_bias)
        if self.loads is not None:
            self.loads += torch.bincount(chosen.flatten(), minlength=self.loads.shape[0])
        return shares, chosen if self.slots is None else self.slots.choose(chosen)

    def router_logits(self, x: Tensor) -> Tensor:
        """Compute the router's logits (num_tokens, num_experts)."""
        logits = two_rows_at_least(Linear(self.router, self.router_bias), x.to(self.router.dtype))
        return logits.float() if logits.dtype == torch.float64 else logits

    def linears(self) -> Iterator[LinearRef]:
        for expert in self.experts.values():
            yield LinearRef(expert, "gate_up")
            yield LinearRef(expert, "down")
        if self.shared is not None:
            yield LinearRef(self.shared, "gate_up")
            yield LinearRef(self.shared, "down")

    def copy(self) -> Self:
        block = super().copy()
        block.__dict__.pop("_together", None)  # for layers that may be replaced
        block.experts = {index: copy.copy(expert) for index, expert in self.experts.items()}
        block.shared = copy.copy(self.shared)
        return block
