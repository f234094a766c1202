"""Moves experts between ranks' GPUs while serving: slices of the stacked weights, of any format.

They are written in place, so captured graphs stay valid. Everything is queued on the step's stream between two steps,
so the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.expert_balancing.moves import ExpertGroup, ExpertRearranger, PlacedLayer, moving_bytes
from engine.expert_balancing.settings import ExpertBalancingSettings
from engine.loader.load import LoadedModel
from engine.moe.expert_stacks import prepare, stacked_of
from engine.moe.moe import Moe


class StackedLayer:
    """A `PlacedLayer` over a block's stacked weights."""

    def __init__(self, block: Moe) -> None:
        assert block.slots is not None, "the model was loaded to have its experts moved"
        self.slots = block.slots
        self._first = block.rule.held_slots.start
        prepare(block)
        self._experts = stacked_of(block)

    def tensors(self, slot: int) -> list[Tensor]:
        stacks = self._experts.gate_up, self._experts.down
        of_all = [each for stack in stacks for each in (stack.weight, stack.scales, stack.bias) if each is not None]
        return [each[slot - self._first] for each in of_all]

    def take_over(self, slot: int, tensors: Sequence[Tensor]) -> None:
        for own, other in zip(self.tensors(slot), tensors, strict=True):
            own.copy_(other)


def open_rearranger(loaded: LoadedModel, group: ExpertGroup) -> ExpertRearranger:
    """Return what executes changes of placement. Connects the ranks, so all of them call this."""
    one_for_each = [1] * group.size
    group.all_to_all(torch.zeros(group.size, 1, dtype=torch.uint8, device=loaded.device), one_for_each, one_for_each)
    return ExpertRearranger(_layers_of(loaded), group)


def bytes_of_moves(loaded: LoadedModel, config: EngineConfig) -> int:
    """Return the memory of the largest exchange of a layer's experts, in torch's allocator; 0 without any."""
    if not config.of(ExpertBalancingSettings).expert_rebalance_interval:
        return 0
    return moving_bytes(_layers_of(loaded), loaded.shard.rank, loaded.shard.size)


def _layers_of(loaded: LoadedModel) -> list[PlacedLayer]:
    return [StackedLayer(block) for block in loaded.model.blocks if isinstance(block, Moe)]
