"""Experts of a model's layers, and a rank's part of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

ScoreKind = Literal["softmax", "sigmoid"]
ExchangeKind = Literal["sum", "dispatch"]


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The experts of a model's layers.

    intermediate_size: of one expert. normalizes_weights: the weights of a token's experts add up to one.
    dense_layers: layers with a plain MLP instead. num_shared_experts: experts that every token uses besides the
    routed ones; gates_shared: their output is multiplied by a sigmoid of the token. expert_rank, expert_ranks: this
    rank has a part of the experts, each of them whole, and a shard of every shared expert. exchange: how ranks use
    each other's experts; with `dispatch` rows are divided among ranks (`engine.expert_parallel.divided_rows`), and
    shared experts are replicated. slots: the expert in each slot of all ranks, see
    `engine.expert_balancing.placement`; empty: every expert once, in order. The other fields are the routing rule,
    see `engine.moe.routing`.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalizes_weights: bool = True
    dense_layers: tuple[int, ...] = ()
    num_shared_experts: int = 0
    gates_shared: bool = False
    score: ScoreKind = "softmax"
    has_choice_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_top: int = 1
    weight_factor: float = 1.0
    float32_router: bool = False
    swiglu_alpha: float = 1.0  # both of experts with a clamped activation, see `engine.moe.stacked_moe`
    swiglu_limit: float = 0.0
    expert_rank: int = 0
    expert_ranks: int = 1
    exchange: ExchangeKind = "sum"
    slots: tuple[int, ...] = ()

    @property
    def num_slots(self) -> int:
        """Number of slots of all ranks: experts, with their replicas."""
        return len(self.slots) or self.num_experts

    @property
    def held_slots(self) -> range:
        """The slots of this rank."""
        count = self.num_slots // self.expert_ranks
        return range(self.expert_rank * count, (self.expert_rank + 1) * count)

    def expert_of(self, slot: int) -> int:
        return self.slots[slot] if self.slots else slot

    @property
    def shared_size(self) -> int:
        """Intermediate size of this rank's part of the shared experts, taken as one."""
        size = self.num_shared_experts * self.intermediate_size
        return size // self.expert_ranks if self.exchange == "sum" else size

    def shard(self, size: int, expert_rank: int | None, exchange: ExchangeKind) -> MoeConfig:
        """Return a rank's config: a shard of every expert, or with expert_rank some whole experts."""
        if expert_rank is None:
            return replace(self, intermediate_size=self.intermediate_size // size)
        return replace(self, expert_rank=expert_rank, expert_ranks=size, exchange=exchange)
