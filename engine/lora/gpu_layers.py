"""A model whose layers add what the adapters of a step's rows do, on a GPU, and which rows these are.

The layers are those of the model with another GEMM: shrink before its own, expand after it. They are no plain layers,
so no op takes them that would make one kernel of a GEMM and what follows it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.gpu.lowering import GpuForwards
from engine.gpu.ops.plain import gemm, workspace_on
from engine.gpu.ops.rules import MANY_ROWS, GpuForward
from engine.gpu.pinning import upload
from engine.layers.linear import Linear
from engine.lora.gpu_slots import GpuSlots
from engine.models.model import Model
from kernels.gpu.lora.low_rank import SlotWeights, config_of, expand, shrink
from kernels.gpu.lora.row_tiles import BLOCK_ROWS, NOTHING, RowTiles, num_tiles, tile_rows


class StepTiles:
    """Which tokens of the step that is queued name which slot. Tensors of graphs' steps are fixed."""

    def __init__(self, num_slots: int, max_tokens: int, device: torch.device) -> None:
        """max_tokens: the most of a graph."""
        self._num_slots, self._device = num_slots, device
        count = num_tiles(max_tokens, num_slots)
        self._rows = torch.full((count, BLOCK_ROWS), NOTHING, dtype=torch.int32, device=device)
        self._slots = torch.full((count,), NOTHING, dtype=torch.int32, device=device)
        self._known: list[int] = []  # what those hold
        self._of_prompts: RowTiles | None = None

    @property
    def has_prompts(self) -> bool:
        return self._of_prompts is not None

    def put(self, slots: Sequence[int], tokens: Sequence[int], num_tokens: int) -> None:
        """Write the tiles of a graph's step. slots: of `tokens`, among `num_tokens`: of a decode step its rows."""
        slot_of_row = np.full(num_tokens, NOTHING, np.int32)
        slot_of_row[tokens] = slots
        if (found := slot_of_row.tolist()) != self._known:
            self._known, tiles = found, tile_rows(slot_of_row, self._num_slots)
            count = tiles.slots.shape[0]
            self._rows[:count].copy_(upload(tiles.rows, torch.int32, self._device))
            self._slots[:count].copy_(upload(tiles.slots, torch.int32, self._device))

    @contextmanager
    def of_prompts(self, slots: Sequence[int], counts: Sequence[int]) -> Iterator[None]:
        """Hold the tiles of a step with prompts. slots: of rows with so many tokens each."""
        tiles = tile_rows(np.repeat(np.array(slots, np.int32), counts), self._num_slots)
        self._of_prompts = RowTiles(*(upload(part, torch.int32, self._device) for part in tiles))
        try:
            yield
        finally:
            self._of_prompts = None

    def of(self, num_tokens: int) -> RowTiles:
        """Return the tiles of a step of so many tokens."""
        if self._of_prompts is not None:
            return self._of_prompts
        count = num_tiles(num_tokens, self._num_slots)
        return RowTiles(self._rows[:count], self._slots[:count])


class AdaptedForwards(GpuForwards):
    """Steps with prompts have one form for any number of tokens: no kernel has to be compiled for few."""

    def choose(self, num_tokens: int, is_decode: bool) -> GpuForward:
        """See GpuForwards."""
        return super().choose(num_tokens if is_decode else MANY_ROWS, is_decode)

    def narrows(self, num_tokens: int, is_decode: bool) -> bool:
        """See GpuForwards. Tiles are of all tokens."""
        return False


def with_slots(model: Model, slots: GpuSlots, tiles: StepTiles) -> Model:
    """The model with layers that add what adapters do. Weights are shared."""
    adapted, workspace = copy.copy(model), workspace_on(model.embedding.device)
    adapted.blocks = [block.copy() for block in model.blocks]
    for ref, weights in zip(adapted.linears(), slots.layers, strict=True):
        if weights is not None:
            ref.replace(_adapted(ref.layer, weights, tiles, workspace))
    return adapted


def _adapted(base: Linear, weights: SlotWeights, tiles: StepTiles, workspace: Any) -> Linear:
    config = config_of(weights)

    def add(_: Linear, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        own = tiles.of(num_rows)
        h = shrink(x, weights, own, config)
        y = gemm(base, MANY_ROWS if tiles.has_prompts else num_rows, workspace)(x)
        expand(y, h, weights, own, config)
        return y

    return Linear(base.weight, gemm=add)
