"""Moves experts between ranks while serving: every rank executes the same change of a layer.

    sent        copies of the experts whose new slots are on other ranks, as bytes, in one all-to-all
    written     in place, to the layers of the changed slots; then the table of slots

The two placements alone determine which rank sends which expert, so no negotiation is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.cpu_gemms.gemms import dense_linear
from engine.expert_balancing.placement import Slots
from engine.expert_parallel.slots import ExpertSlots
from engine.layers.block import Block
from engine.layers.linear import Linear, plain
from engine.moe.moe import Moe
from engine.plan import PlacedExperts, StepPlan
from engine.quantization.cpu_linears import int8, int8_weight
from engine.ranks import PlanListener


@dataclass(frozen=True, slots=True)
class Move:
    """A slot that gets another expert (target), and a slot that has it (source)."""

    source: int
    target: int


def moves_between(before: Slots, after: Slots, num_ranks: int) -> list[Move]:
    """Return a move for each slot that changes: from the same rank if it has the expert, else from ranks in turn."""
    count = len(before) // num_ranks
    moves: list[Move] = []
    for target, (old, expert) in enumerate(zip(before, after, strict=True)):
        if old == expert:
            continue
        sources = [slot for slot, held in enumerate(before) if held == expert]
        own = [slot for slot in sources if slot // count == target // count]
        moves.append(Move(own[0] if own else sources[target % len(sources)], target))
    return moves


class ExpertGroup(Protocol):
    """The ranks that exchange experts."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send rows of x (sum(send), columns) in the order of ranks; returns received (sum(receive), columns)."""
        ...


class PlacedLayer(Protocol):
    """A layer's experts on this rank: in memory that is written in place, all of one size."""

    @property
    def slots(self) -> ExpertSlots:
        """The layer's slots on all ranks."""
        ...

    def tensors(self, slot: int) -> list[Tensor]:
        """Return all tensors of the expert in one of this rank's slots."""
        ...

    def take_over(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Write an expert's tensors to a slot."""
        ...


class LinearExperts:
    """A `PlacedLayer` whose experts are separate linear layers, as on a CPU."""

    def __init__(self, block: Moe) -> None:
        """Raises ConfigError for experts that cannot be written in place."""
        assert block.slots is not None, "the model was loaded to have its experts moved"
        self.slots = block.slots
        self._layers: dict[int, list[Linear]] = {}
        for slot, expert in block.experts.items():
            layers = [each for each in (expert.gate_up, expert.down) if each.gemm in (plain, int8)]
            if len(layers) < 2:
                raise ConfigError(
                    "--expert-rebalance-interval moves plain and int8 experts alone on CPUs: choose "
                    "--quant-mode none or int8-weight"
                )
            self._layers[slot] = layers

    def tensors(self, slot: int) -> list[Tensor]:
        return [tensor for layer in self._layers[slot] for tensor in _tensors_of(layer)]

    def take_over(self, slot: int, tensors: Sequence[Tensor]) -> None:
        rest = iter(tensors)
        for layer in self._layers[slot]:
            for own in _tensors_of(layer):
                own.copy_(next(rest))
            if layer.dense is not None:  # of int8 layers
                layer.dense.weight = dense_linear(int8_weight(layer), None).weight


def _tensors_of(layer: Linear) -> list[Tensor]:
    """Return the tensors that define a layer: copying another layer's into them makes it that layer."""
    return [each for each in (layer.weight, layer.scales, layer.bias) if each is not None]


def linear_experts(blocks: Iterable[Block]) -> list[PlacedLayer]:
    """Return the layers of experts among a model's blocks. Raises ConfigError for experts that cannot be moved."""
    return [LinearExperts(block) for block in blocks if isinstance(block, Moe)]


class ExpertRearranger(PlanListener):
    """Executes one rank's part. All ranks call `place` with the same changes in the same order."""

    def __init__(self, layers: Sequence[PlacedLayer], group: ExpertGroup) -> None:
        self._layers, self._group = layers, group

    def on_plan(self, plan: StepPlan) -> None:
        if plan.placed is not None:
            self.place(plan.placed)

    def place(self, placed: PlacedExperts) -> None:
        """Exchange a layer's experts between ranks, and route by the new placement from now on."""
        layer, group = self._layers[placed.index], self._group
        count, ranks = len(placed.slots) // group.size, range(group.size)
        moves = moves_between(layer.slots.placement, placed.slots, group.size)
        sent = [[move for move in moves if _ranks_of(move, count) == (group.rank, rank)] for rank in ranks]
        came = [[move for move in moves if _ranks_of(move, count) == (rank, group.rank)] for rank in ranks]
        sources = [move.source for to_rank in sent for move in to_rank]
        targets = [move.target for from_rank in came for move in from_rank]
        any_expert = layer.tensors(group.rank * count)
        rows = torch.empty(len(sources), _num_bytes(any_expert), dtype=torch.uint8, device=any_expert[0].device)
        for slot, row in zip(sources, rows, strict=True):
            _pack(layer.tensors(slot), row)
        received = group.all_to_all(rows, [len(each) for each in sent], [len(each) for each in came])
        for slot, row in zip(targets, received, strict=True):
            layer.take_over(slot, _unpack(row, layer.tensors(slot)))
        layer.slots.place(placed.slots)


def moving_bytes(layers: Sequence[PlacedLayer], rank: int, num_ranks: int) -> int:
    """Return the most memory for a rank's part of an exchange: the experts of all its slots, sent and received."""
    counts = [len(layer.slots.placement) // num_ranks for layer in layers]
    sizes = [_num_bytes(layer.tensors(rank * count)) for layer, count in zip(layers, counts, strict=True)]
    return max((2 * count * size for count, size in zip(counts, sizes, strict=True)), default=0)


def _ranks_of(move: Move, count: int) -> tuple[int, int]:
    """Return the ranks that send and receive the expert. count: slots per rank."""
    return move.source // count, move.target // count


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _pack(tensors: Sequence[Tensor], row: Tensor) -> None:
    """Concatenate all tensors into a row of bytes."""
    for piece, tensor in zip(torch.split(row, [each.nbytes for each in tensors]), tensors, strict=True):
        piece.copy_(tensor.contiguous().view(torch.uint8).flatten())


def _unpack(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the packed tensors with dtypes and shapes of `like`, copied for alignment."""
    pieces = torch.split(row, [each.nbytes for each in like])
    return [piece.clone().view(each.dtype).view(each.shape) for piece, each in zip(pieces, like, strict=True)]
