"""One rank's part of a model's weights, read from any source of whole ones, or cut where it cannot read parts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.weights import Part, Partition, PartSource, WeightSource
from engine.loader.checkpoint import Shape
from kvstore.layout import Shard


class ShardedWeights:
    """Takes whole weights in the same order on all ranks, and keeps this rank's part.

    parts: of weights that are divided, once they were asked for.
    """

    def __init__(self, whole: WeightSource, shapes: Mapping[str, Shape], shard: Shard) -> None:
        """shapes: of the whole weights, as the whole model asks for them."""
        self.parts: dict[str, Part] = {}
        self._whole = whole
        self._shapes = shapes
        self._shard = shard

    def take(self, name: str, shape: Shape, partition: Partition = Partition.NONE) -> Tensor:
        """See WeightSource."""
        is_added_once = partition is Partition.ROWS and len(shape) == 1  # a bias, on the sum over ranks
        if partition is Partition.NONE or partition is Partition.ONCE or is_added_once:
            weight = self._whole.take(name, self._shapes[name], partition)
            return weight if partition is Partition.NONE or self._shard.rank == 0 else torch.zeros_like(weight)
        part = self.parts[name] = part_of(self._shapes[name], shape, partition, self._shard)
        inside = tuple(map(_inside, part, self._shapes[name]))
        if isinstance(self._whole, PartSource):
            return _padded(self._whole.take_part(name, inside), shape)
        weight = self._whole.take(name, self._shapes[name], partition)
        found = weight[tuple(slice(indices.start, indices.stop) for indices in inside)]
        return _padded(found.clone(memory_format=torch.contiguous_format), shape)


def part_of(whole: Shape, shape: Shape, partition: Partition, shard: Shard) -> Part:
    """Where a rank's weight of that shape lies in the whole one, which is divided: the one place that says so."""
    dim = {Partition.ROWS: 1, Partition.LAST: len(shape) - 1}.get(partition, 0)
    piece = shard.rank
    if partition is not Partition.VOCAB:
        num_pieces = whole[dim] // shape[dim]  # fewer than ranks: several hold the same KV head
        piece = shard.rank * num_pieces // shard.size
    part = [range(size) for size in whole]
    part[dim] = range(piece * shape[dim], (piece + 1) * shape[dim])
    return tuple(part)


def _inside(indices: range, size: int) -> range:
    return range(min(indices.start, size), min(indices.stop, size))


def _padded(weight: Tensor, shape: Shape) -> Tensor:
    """With zeros behind the last row, as the last rank's vocabulary may need them."""
    if weight.is_meta:
        return torch.empty(shape, dtype=weight.dtype, device="meta")
    if weight.shape == shape:
        return weight
    return functional.pad(weight, (0, 0) * (len(shape) - 1) + (0, shape[0] - weight.shape[0]))
