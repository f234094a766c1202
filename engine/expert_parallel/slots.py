"""Which replica of a chosen expert computes a token: replicas take turns by the token's row.

    slot(row, expert) = replicas(expert)[row mod their number]

All ranks that have the same rows choose the same slots, and say nothing to each other. Placements are made by
`engine/expert_balancing/placement.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ExpertSlots:
    """table: (num_experts, most replicas) slots of each expert. counts: (num_experts,), how many it has."""

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        """slots: the expert in each, all of them at least once."""
        self.placement = tuple(slots)
        self.table, self.counts = _tensors(slots, device)

    def place(self, slots: Sequence[int]) -> None:
        """Change the placement, in the same memory. slots: as many, of the same experts."""
        self.placement = tuple(slots)
        for own, new in zip((self.table, self.counts), _tensors(slots, torch.device("cpu")), strict=True):
            own.copy_(new.pin_memory() if own.is_cuda else new, non_blocking=True)  # the host does not wait

    def choose(self, chosen: Tensor) -> Tensor:
        """Slots of experts, int64 (num_tokens, top_k) both."""
        rows = torch.arange(chosen.shape[0], device=chosen.device)[:, None]
        slots: Tensor = self.table[chosen, rows % self.counts[chosen]]
        return slots


def _tensors(slots: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Table and counts. Any placement of so many slots has the same shapes."""
    replicas: list[list[int]] = [[] for _ in range(max(slots) + 1)]
    for slot, expert in enumerate(slots):
        replicas[expert].append(slot)
    most = len(slots) - len(replicas) + 1
    table = torch.tensor([own + own[:1] * (most - len(own)) for own in replicas], device=device)
    return table, torch.tensor([len(own) for own in replicas], device=device)
