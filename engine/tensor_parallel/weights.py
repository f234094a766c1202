"""A rank's part of weights from any source, see `engine.layers.weights.Partition`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.weights import Part, Partition, PartSource
from engine.loader.checkpoint import Shape
from engine.loader.partial_weights import PartialWeights
from kvstore.layout import Shard


class RankWeights(PartialWeights):
    """Takes the same weights in the same order on all ranks, and keeps this rank's part."""

    def __init__(self, shard: Shard, whole: Mapping[str, Shape], *args: Any, **options: Any) -> None:
        """whole: shapes of whole weights. args, options: of PartialWeights."""
        super().__init__(*args, **options)
        self._shard, self._whole = shard, whole

    def take(self, name: str, shape: Shape, partition: Partition = Partition.NONE) -> Tensor:
        """See PartialWeights."""
        is_on_sum = partition is Partition.ROWS and len(shape) == 1  # a bias, on the sum over ranks
        is_once = partition is Partition.ONCE or is_on_sum
        if partition is not Partition.NONE and not is_once:
            self.parts[name] = part_of(self._whole[name], shape, partition, self._shard)
        weight = super().take(name, shape, partition)
        return torch.zeros_like(weight) if is_once and self._shard.rank else weight

    def _read(self, name: str, shape: Shape, partition: Partition) -> Tensor:
        whole = self._whole.get(name, shape)
        if name not in self.parts:
            return super()._read(name, whole, partition)
        inside = tuple(map(_inside, self.parts[name], whole))
        if isinstance(self._source, PartSource):
            return _padded(self._source.take_part(name, inside), shape)
        weight = super()._read(name, whole, partition)
        found = weight[tuple(slice(indices.start, indices.stop) for indices in inside)]
        return _padded(found.clone(memory_format=torch.contiguous_format), shape)


def part_of(whole: Shape, shape: Shape, partition: Partition, shard: Shard) -> Part:
    """Return where a rank's weight of this shape is in the whole one. Only this function decides that."""
    dim = {Partition.ROWS: 1, Partition.LAST: len(shape) - 1}.get(partition, 0)
    piece = shard.rank
    if partition is not Partition.VOCAB:
        num_pieces = whole[dim] // shape[dim]  # fewer than ranks if several hold the same KV head
        piece = shard.rank * num_pieces // shard.size
    part = [range(size) for size in whole]
    part[dim] = range(piece * shape[dim], (piece + 1) * shape[dim])
    return tuple(part)


def _inside(indices: range, size: int) -> range:
    return range(min(indices.start, size), min(indices.stop, size))


def _padded(weight: Tensor, shape: Shape) -> Tensor:
    """Pad with zero rows, as the last rank's vocabulary may need."""
    if weight.shape == shape:
        return weight
    return functional.pad(weight, (0, 0) * (len(shape) - 1) + (0, shape[0] - weight.shape[0]))
