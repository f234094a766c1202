"""One rank's part of a model's weights, cut from any source of whole ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.weights import Partition, WeightSource
from engine.loader.checkpoint import Shape
from kvstore.layout import Shard


class ShardedWeights:
    """Reads whole weights and keeps this rank's part. Whole ones are asked for in the same order on all ranks."""

    def __init__(self, whole: WeightSource, shapes: Mapping[str, Shape], shard: Shard) -> None:
        """shapes: of the whole weights, as the whole model asks for them."""
        self._whole = whole
        self._shapes = shapes
        self._shard = shard

    def take(self, name: str, shape: Shape, partition: Partition = Partition.NONE) -> Tensor:
        """See WeightSource."""
        weight = self._whole.take(name, self._shapes[name], partition)
        if partition is Partition.NONE:
            return weight
        is_added_once = partition is Partition.ROWS and len(shape) == 1  # a bias, on the sum over ranks
        if is_added_once or partition is Partition.ONCE:
            return weight if self._shard.rank == 0 else torch.zeros_like(weight)
        if partition is Partition.VOCAB:
            first = self._shard.rank * shape[0]
            mine = weight[first : first + shape[0]]
            return functional.pad(mine, (0, 0, 0, shape[0] - mine.shape[0]))
        dim = {Partition.ROWS: 1, Partition.LAST: len(shape) - 1}.get(partition, 0)
        num_pieces = weight.shape[dim] // shape[dim]  # fewer than ranks: several hold the same KV head
        piece = self._shard.rank * num_pieces // self._shard.size
        return weight.narrow(dim, piece * shape[dim], shape[dim]).clone(memory_format=torch.contiguous_format)
