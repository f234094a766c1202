"""What a model takes while it is built: a rank's and a stage's part of weights from any source, counted.

Knows neither what the source is nor who is told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.weights import Part, Partition, PartSource, WeightSource
from engine.loader.checkpoint import Shape, layer_of
from engine.start_progress import OnProgress, no_progress
from kvstore.layout import WHOLE, Shard

INTERVAL_SECONDS = 0.1


class ModelWeights:
    """Takes whole weights in the same order on all ranks and stages, and keeps this one's part.

    parts: of weights that are divided among ranks, once they were asked for.
    """

    def __init__(
        self, source: WeightSource, needed: Mapping[str, Shape], whole: Mapping[str, Shape], *,
        shard: Shard = WHOLE, kept: Collection[str] = (), on_progress: OnProgress = no_progress,
        dtype: torch.dtype = torch.bfloat16, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """needed: shapes of all that this rank reads. whole: of whole weights, if ranks have parts of them.

        kept: come without storage and are read later, and `count`ed then. on_progress: is told which part of the
        model's numbers has been read, at most ten times a second and at the end.
        """
        self.parts: dict[str, Part] = {}
        self._source, self._whole, self._shard, self._kept = source, whole, shard, kept
        self._dtype, self._device = dtype, device
        self._unread = {name: math.prod(shape) for name, shape in needed.items()}
        self._needed = needed.keys()
        self._total, self._num_read = sum(self._unread.values()), 0
        self._on_progress, self._told = on_progress, 0.0

    def take(self, name: str, shape: Shape, partition: Partition = Partition.NONE) -> Tensor:
        """See WeightSource. Other stages' weights come without storage, or those of no layer without rows."""
        is_on_sum = partition is Partition.ROWS and len(shape) == 1  # a bias, on the sum over ranks
        is_once = partition is Partition.ONCE or is_on_sum
        if self._shard.size > 1 and partition is not Partition.NONE and not is_once:
            self.parts[name] = part_of(self._whole[name], shape, partition, self._shard)
        is_needed, draws_in_turn = name in self._needed, not isinstance(self._source, PartSource)
        if draws_in_turn or (is_needed and name not in self._kept):
            weight = self._read(name, shape, partition)
            if is_needed:
                self.count(name)
                return torch.zeros_like(weight) if is_once and self._shard.rank else weight
        if is_needed or layer_of(name) is not None:
            return torch.empty(shape, dtype=self._dtype, device="meta")
        return torch.empty((0, *shape[1:]), dtype=self._dtype, device=self._device)

    def count(self, name: str) -> None:
        """A weight has been read, perhaps once more: an expert may have several slots."""
        self._num_read += self._unread.pop(name, 0)
        now = time.monotonic()
        if now - self._told >= INTERVAL_SECONDS or self._num_read == self._total:
            self._told = now
            self._on_progress("loading weights", self._num_read / self._total)

    def _read(self, name: str, shape: Shape, partition: Partition) -> Tensor:
        whole = self._whole.get(name, shape)
        if name not in self.parts:
            return self._source.take(name, whole, partition)
        inside = tuple(map(_inside, self.parts[name], whole))
        if isinstance(self._source, PartSource):
            return _padded(self._source.take_part(name, inside), shape)
        weight = self._source.take(name, whole, partition)
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
    """Pad with zero rows, which the last rank's vocabulary may need."""
    if weight.shape == shape:
        return weight
    return functional.pad(weight, (0, 0) * (len(shape) - 1) + (0, shape[0] - weight.shape[0]))
