"""What a model takes while it is built: weights from any source, counted.

Knows neither what the source is nor who is told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from engine.layers.weights import Part, Partition, PartSource, WeightSource
from engine.loader.checkpoint import Shape, layer_of
from engine.start_progress import OnProgress, no_progress

INTERVAL_SECONDS = 0.1


class ModelWeights:
    """Takes weights in the same order in all processes of a model.

    parts: of weights that are divided among ranks, once they were asked for.
    """

    def __init__(
        self, source: WeightSource, needed: Mapping[str, Shape], *, kept: Collection[str] = (),
        on_progress: OnProgress = no_progress, dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """needed: shapes of all that this process reads. kept: come without storage and are read later, and `count`ed
        then. on_progress: is told which part of the model's numbers has been read, at most ten times a second and at
        the end.
        """
        self.parts: dict[str, Part] = {}
        self._source, self._kept = source, kept
        self._dtype, self._device = dtype, device
        self._unread = {name: math.prod(shape) for name, shape in needed.items()}
        self._needed = needed.keys()
        self._total, self._num_read = sum(self._unread.values()), 0
        self._on_progress, self._told = on_progress, 0.0

    def take(self, name: str, shape: Shape, partition: Partition = Partition.NONE) -> Tensor:
        """See WeightSource. What is not needed comes without storage, or that of no layer without rows."""
        is_needed, draws_in_turn = name in self._needed, not isinstance(self._source, PartSource)
        if draws_in_turn or (is_needed and name not in self._kept):
            weight = self._read(name, shape, partition)
            if is_needed:
                self.count(name)
                return weight
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
        return self._source.take(name, shape, partition)
