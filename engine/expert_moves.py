"""Experts that go from rank to rank while serving: every rank executes the same change of a layer (decision 0277).

    sent        copies of the experts whose new slots are on other ranks, as bytes, in one all-to-all
    written     into the layers of the slots that change, in the same memory; then the map of slots

Which rank sends which expert follows from the two placements alone, so ranks say nothing to each other first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.expert_placement import Slots
from engine.layers.block import Block
from engine.layers.linear import Int8Linear, Linear
from engine.layers.moe import Expert, Moe
from engine.layers.parallel import Group
from engine.plan import PlacedExperts


@dataclass(frozen=True, slots=True)
class Move:
    """A slot that gets another expert, and a slot that has it."""

    source: int
    target: int


def moves_between(before: Slots, after: Slots, num_ranks: int) -> list[Move]:
    """One for each slot that changes: from the same rank if it has the expert, else from one that does, in turn."""
    count = len(before) // num_ranks
    moves: list[Move] = []
    for target, (old, expert) in enumerate(zip(before, after, strict=True)):
        if old == expert:
            continue
        sources = [slot for slot, held in enumerate(before) if held == expert]
        own = [slot for slot in sources if slot // count == target // count]
        moves.append(Move(own[0] if own else sources[target % len(sources)], target))
    return moves


class ExpertMover:
    """One rank's part. All ranks call `place` with the same changes in the same order."""

    def __init__(self, blocks: Sequence[Block], group: Group) -> None:
        """blocks: of a model, whose experts alone are moved. Raises ConfigError for experts that cannot be."""
        self._blocks = [block for block in blocks if isinstance(block, Moe)]
        self._group = group
        for block in self._blocks:
            for expert in block.experts.values():
                _layers(expert)

    def place(self, placed: PlacedExperts) -> None:
        """Exchange the experts of a layer, and route by the new placement from now on."""
        block, group = self._blocks[placed.index], self._group
        assert block.slots is not None, "the model was loaded to have its experts moved"
        count, ranks = len(placed.slots) // group.size, range(group.size)
        moves = moves_between(block.slots.placement, placed.slots, group.size)
        sent = [[move for move in moves if _ranks_of(move, count) == (group.rank, rank)] for rank in ranks]
        came = [[move for move in moves if _ranks_of(move, count) == (rank, group.rank)] for rank in ranks]
        sources = [move.source for to_rank in sent for move in to_rank]
        targets = [move.target for from_rank in came for move in from_rank]
        width = sum(_sizes(block.experts[group.rank * count]))
        rows = torch.empty(len(sources), width, dtype=torch.uint8)
        for slot, row in zip(sources, rows, strict=True):
            _pack(block.experts[slot], row)
        received = group.all_to_all(rows, [len(each) for each in sent], [len(each) for each in came])
        for slot, row in zip(targets, received, strict=True):
            _unpack(row, block.experts[slot])
        block.slots.place(placed.slots)


def _ranks_of(move: Move, count: int) -> tuple[int, int]:
    """The rank that has the expert, and the one that gets it; count: slots of a rank."""
    return move.source // count, move.target // count


def _layers(expert: Expert) -> list[Linear | Int8Linear]:
    layers = [layer for layer in (expert.gate_up, expert.down) if isinstance(layer, Linear | Int8Linear)]
    if len(layers) < 2:
        raise ConfigError(
            "--expert-rebalance-interval moves plain and int8 experts alone: choose --quant-mode none or int8-weight"
        )
    return layers


def _tensors(expert: Expert) -> list[Tensor]:
    return [tensor for layer in _layers(expert) for tensor in layer.tensors()]


def _sizes(expert: Expert) -> list[int]:
    return [tensor.nbytes for tensor in _tensors(expert)]


def _pack(expert: Expert, row: Tensor) -> None:
    """Copy all that the expert is into a row of bytes."""
    for piece, tensor in zip(torch.split(row, _sizes(expert)), _tensors(expert), strict=True):
        piece.copy_(tensor.contiguous().view(torch.uint8).flatten())


def _unpack(row: Tensor, expert: Expert) -> None:
    """Make `expert` the one that was packed."""
    pieces = iter(torch.split(row, _sizes(expert)))
    for layer in _layers(expert):
        layer.take_over([_as(next(pieces), tensor) for tensor in layer.tensors()])


def _as(piece: Tensor, like: Tensor) -> Tensor:
    """Bytes as a tensor of that type and shape; in memory of its own, which is aligned."""
    return piece.clone().view(like.dtype).view(like.shape)
