"""Weights that are counted while they are read. Knows neither where they come from nor who is told."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from torch import Tensor

from engine.layers.weights import Partition, WeightSource
from engine.loader.checkpoint import Shape
from engine.start_progress import OnProgress

INTERVAL_SECONDS = 0.1


class CountedWeights:
    """Tells which part of a model's numbers has been read, at most ten times a second and at the end."""

    def __init__(self, weights: WeightSource, shapes: Mapping[str, Shape], on_progress: OnProgress) -> None:
        """shapes: of all that the model takes."""
        self._weights = weights
        self._sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        self._total = sum(self._sizes.values())
        self._on_progress = on_progress
        self._num_read = 0
        self._told = 0.0

    def take(self, name: str, shape: Shape, partition: Partition = Partition.NONE) -> Tensor:
        """See WeightSource. What comes without storage is read later, and `count`ed then."""
        weight = self._weights.take(name, shape, partition)
        if not weight.is_meta:
            self.count(name)
        return weight

    def count(self, name: str) -> None:
        """A weight has been read, perhaps once more: an expert may have several slots."""
        self._num_read += self._sizes.pop(name, 0)
        now = time.monotonic()
        if now - self._told >= INTERVAL_SECONDS or self._num_read == self._total:
            self._told = now
            self._on_progress("loading weights", self._num_read / self._total)
