"""Chooses the replica of a chosen expert that computes a token: replicas alternate by the token's row.

    slot(row, expert) = replicas(expert)[row mod their number]

All ranks with the same rows choose the same slots, without communication. `engine/expert_balancing/placement.py`
makes placements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ExpertSlots:
    """A layer's slots. table: (num_experts, most replicas), slots of each expert. counts: (num_experts,)."""

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        """slots: the expert of each slot; every expert at least once."""
        self.placement = tuple(slots)
        self.table, self.counts = _tensors(slots, device)

    def place(self, slots: Sequence[int]) -> None:
        """Change the placement in place. slots: as many, of the same experts."""
        self.placement = tuple(slots)
        for own, new in zip((self.table, self.counts), _tensors(slots, torch.device("cpu")), strict=True):
            own.copy_(new.pin_memory() if own.is_cuda else new, non_blocking=True)  # the host does not wait

    def choose(self, chosen: Tensor) -> Tensor:
        """Return the slots of chosen experts, int64 (num_tokens, top_k) both."""
        rows = torch.arange(chosen.shape[0], device=chosen.device)[:, None]
        slots: Tensor = self.table[chosen, rows % self.counts[chosen]]
        return slots


def _tensors(slots: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return table and counts, whose shapes depend only on the numbers of slots and experts."""
    replicas: list[list[int]] = [[] for _ in range(max(slots) + 1)]
    for slot, expert in enumerate(slots):
        replicas[expert].append(slot)
    most = len(slots) - len(replicas) + 1
    table = torch.tensor([own + own[:1] * (most - len(own)) for own in replicas], device=device)
    return table, torch.tensor([len(own) for own in replicas], device=device)
