"""A checkpoint's tensors with the weights that lie in others as rows, see `stored_rows.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.fused.stored_rows import StoredRows, stored_rows
from engine.layers.weights import Part
from engine.loader.checkpoint import Shape
from engine.loader.safetensors import PLAIN_TYPES, SafetensorsWeights
from engine.models.config import ModelConfig
from engine.models.registry import Fused


class DividedWeights(SafetensorsWeights):
    """Names of `rows` stand for rows of tensors, where these are plain and have as many."""

    def __init__(self, whole: SafetensorsWeights, rows: Mapping[str, StoredRows]) -> None:
        self.files, self.dtype, self.device, self.prefix = whole.files, whole.dtype, whole.device, whole.prefix
        self.tensors = dict(whole.tensors)
        self._open_files: dict[Path, Any] = {}
        self._rows: dict[str, StoredRows] = {}
        for name, lies in rows.items():
            stored = whole.tensors.get(lies.stored)
            if stored is not None and stored.type_name in PLAIN_TYPES and stored.shape[0] == lies.stored_rows:
                self._rows[name] = lies
                self.tensors[name] = replace(stored, shape=(lies.num_rows, *stored.shape[1:]))
        for name in {lies.stored for lies in self._rows.values()} - rows.keys():
            del self.tensors[name]

    def _open(self, name: str, part: Part | None = None) -> Tensor:
        lies = self._rows.get(name)
        if lies is None:
            return super()._open(name, part)
        path, shape = self.tensors[name].path, self.tensors[name].shape
        inside = (part or ())[: len(shape)] or tuple(map(range, shape))
        tensor = self._open_in(path, lies.stored, (lies.stored_rows, *shape[1:]), lies.part(inside))
        order = lies.order(tensor.shape[0])
        return tensor if order is None else tensor[order]


def divided(
    tensors: SafetensorsWeights, needed: Mapping[str, Shape], fused: Fused, config: ModelConfig
) -> tuple[DividedWeights, Mapping[str, StoredRows]]:
    """The checkpoint as the model asks for it, and where the needed weights are that it stores otherwise."""
    rows = stored_rows(needed, fused, config)
    return DividedWeights(tensors, rows), rows
