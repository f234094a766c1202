"""What a process takes of a model of which it does not read all: a rank, a stage, layers that stay quantized."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from engine.layers.weights import Part, Partition, PartSource, WeightSource
from engine.loader.checkpoint import ModelWeights, Shape
from engine.wings import OnProgress, no_progress

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The layer that a weight belongs to; None: the embedding, the final norm or the head."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


class PartialWeights(ModelWeights):
    """See ModelWeights. parts: of weights that are divided among ranks, once they were asked for."""

    def __init__(
        self, source: WeightSource, needed: Mapping[str, Shape], *, kept: Collection[str] = (),
        on_progress: OnProgress = no_progress, dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """kept: of those that are needed, come without storage and are read later, and `count`ed then."""
        super().__init__(source, needed, on_progress)
        self.parts: dict[str, Part] = {}
        self._needed, self._kept = needed.keys(), kept
        self._dtype, self._device = dtype, device

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

    def _read(self, name: str, shape: Shape, partition: Partition) -> Tensor:
        return self._source.take(name, shape, partition)
