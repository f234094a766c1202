"""A model on a GPU whose layers add the adapters of a step's rows, and the lists of these rows.

Its layers have another GEMM. Up to 64 rows of 16-bit weights take a shrink and a GEMM that adds the adapters, and for
gate and up the activation; others take shrink, base GEMM and expand. These layers do not count as plain, so no op
fuses them with what follows. If adapters may change the embedding, its lookup is not fused with the first norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.gpu.lowering import GpuForwards
from engine.gpu.ops.plain import gemm, workspace_on
from engine.gpu.ops.rules import MANY_ROWS, GpuForward
from engine.gpu.pinning import upload
from engine.layers.linear import Linear, LinearLayer
from engine.lora.gpu_slots import GpuSlots
from engine.models.model import Model
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.lora.adapted_gemm import adapted_gemm, gemm_config_of
from kernels.gpu.lora.gated_rows import gated_rows, takes_gated_rows
from kernels.gpu.lora.look_up import look_up
from kernels.gpu.lora.low_rank import SlotWeights, config_of, expand, shrink
from kernels.gpu.lora.row_tiles import BLOCK_ROWS, NOTHING, RowTiles, num_tiles, tile_rows
from kernels.gpu.lora.tile_shrink import MAX_ROWS, shrink_workspace, tile_shrink


class StepTiles:
    """The rows of the step being queued by slot: tokens, or the rows of the head.

    Tensors of steps with graphs are fixed.
    """

    def __init__(self, num_slots: int, max_tokens: int, device: torch.device) -> None:
        """max_tokens: the most of a graph."""
        self._num_slots, self._device = num_slots, device
        count = num_tiles(max_tokens, num_slots)
        self._rows = torch.full((count, BLOCK_ROWS), NOTHING, dtype=torch.int32, device=device)
        self._slots = torch.full((count,), NOTHING, dtype=torch.int32, device=device)
        self._tile_of_row = torch.full((max_tokens,), NOTHING, dtype=torch.int32, device=device)
        self._known: list[int] = []  # the rows written there
        self._of_prompts: RowTiles | None = None

    @property
    def has_prompts(self) -> bool:
        return self._of_prompts is not None

    def put(self, slots: Sequence[int], tokens: Sequence[int], num_tokens: int) -> None:
        """Write the tiles of a graph's step. slots: of `tokens`, out of `num_tokens`; or rows of a decode step."""
        slot_of_row = np.full(num_tokens, NOTHING, np.int32)
        slot_of_row[tokens] = slots
        if (found := slot_of_row.tolist()) != self._known:
            self._known, tiles = found, tile_rows(slot_of_row, self._num_slots)
            for held, part in zip(self.of(num_tokens), tiles, strict=True):
                held.copy_(upload(part, torch.int32, self._device))

    @contextmanager
    def of_prompts(self, slots: Sequence[int], counts: Sequence[int]) -> Iterator[None]:
        """Use the tiles of a step with prompts. slots: of rows. counts: tokens of each row."""
        tiles = tile_rows(np.repeat(np.array(slots, np.int32), counts), self._num_slots)
        before = self._of_prompts
        self._of_prompts = RowTiles(*(upload(part, torch.int32, self._device) for part in tiles))
        try:
            yield
        finally:
            self._of_prompts = before

    def of(self, num_tokens: int) -> RowTiles:
        """Return the tiles of a step of `num_tokens` tokens."""
        if self._of_prompts is not None:
            return self._of_prompts
        count = num_tiles(num_tokens, self._num_slots)
        return RowTiles(self._rows[:count], self._slots[:count], self._tile_of_row[:num_tokens])


class AdapterTiles:
    """Tiles of a step. tokens: for the layers. head: for the output projection, None if adapters leave it."""

    def __init__(self, slots: GpuSlots, max_tokens: int, device: torch.device) -> None:
        """max_tokens: the most of a graph."""
        self.tokens = StepTiles(slots.count, max_tokens, device)
        self.head = None if slots.layers[-1] is None else StepTiles(slots.count, max_tokens, device)

    def put(self, slots: Sequence[int], tokens: Sequence[int], num_tokens: int) -> None:
        """See StepTiles, for a step in which the head gets all tokens."""
        self.tokens.put(slots, tokens, num_tokens)
        self.put_sampled(slots, tokens, num_tokens)

    def put_sampled(self, slots: Sequence[int], rows: Sequence[int], num_rows: int) -> None:
        """See `StepTiles.put`, for the rows of the head."""
        if self.head is not None:
            self.head.put(slots, rows, num_rows)

    @contextmanager
    def of_prompts(self, slots: Sequence[int], counts: Sequence[int], sampled: Sequence[int]) -> Iterator[None]:
        """See `StepTiles.of_prompts`. sampled: the slots of the head's rows."""
        with self.tokens.of_prompts(slots, counts), self.of_head(sampled):
            yield

    @contextmanager
    def of_head(self, slots: Sequence[int]) -> Iterator[None]:
        """Use the tiles of the head's rows, without a graph."""
        with ExitStack() as held:
            if self.head is not None:
                held.enter_context(self.head.of_prompts(slots, [1] * len(slots)))
            yield


class AdaptedForwards(GpuForwards):
    """Steps with prompts have one form for any number of tokens, so that no kernel is compiled for few."""

    def choose(self, num_tokens: int, is_decode: bool) -> GpuForward:
        """See GpuForwards."""
        return super().choose(num_tokens if is_decode else MANY_ROWS, is_decode)

    def narrows(self, num_tokens: int, is_decode: bool) -> bool:
        """See GpuForwards. Tiles cover all tokens."""
        return False


@dataclass(slots=True, kw_only=True)
class AdaptedModel(Model):
    """A model whose embedding may have adapters."""

    slots: GpuSlots
    tiles: StepTiles = field(repr=False)

    def embedded(self, rows: Tensor, token_ids: Tensor, first_id: int = 0) -> Tensor:
        """See Model."""
        rows, weights = Model.embedded(self, rows, token_ids, first_id), self.slots.embedding
        if weights is not None:
            own = self.tiles.of(token_ids.shape[0])
            expand(rows, look_up(token_ids, weights, own, first_id), weights, own, config_of(weights))
        return rows

    @property
    def takes_rows_as_they_are(self) -> bool:
        """See Model."""
        return self.slots.embedding is None and self.embedding_scale is None


def with_slots(model: Model, slots: GpuSlots, tiles: AdapterTiles) -> Model:
    """Return the model with layers that add adapters, with shared weights."""
    values = {each.name: getattr(model, each.name) for each in fields(Model)}
    adapted, device = AdaptedModel(**values, slots=slots, tiles=tiles.tokens), model.embedding.device
    layers = [weights for weights in slots.layers if weights is not None]
    workspaces = workspace_on(device), shrink_workspace(layers, device)
    adapted.blocks = [block.copy() for block in model.blocks]
    *of_blocks, (_, of_head) = zip(adapted.linears(), slots.layers, strict=True)
    for ref, weights in of_blocks:
        if weights is not None:
            plain = partial(_gemm, ref.layer, tiles.tokens, workspaces[0])
            ref.replace(AdaptedLinear(ref.layer, weights, tiles.tokens, plain, workspaces))
    if tiles.head is not None and of_head is not None:
        adapted.head = AdaptedLinear(model.head, of_head, tiles.head, model.head)
    return adapted


def _gemm(base: Linear, tiles: StepTiles, workspace: Any, x: Tensor) -> Tensor:
    return gemm(base, MANY_ROWS if tiles.has_prompts else x.shape[0], workspace)(x)


class AdaptedLinear(Linear):
    """A layer, which `plain` computes, plus its adapters.

    workspaces: of GEMMs and of shrinks, which overlap; None: base GEMM and adapters stay apart.
    """

    __slots__ = ("_base", "_config", "_plain", "_tiles", "_weights", "_workspaces")

    def __init__(
        self, base: Linear, weights: SlotWeights, tiles: StepTiles, plain: LinearLayer,
        workspaces: tuple[SplitKWorkspace, SplitKWorkspace] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(base.weight, gemm=self._add)
        self._base, self._weights, self._tiles, self._plain = base, weights, tiles, plain
        self._workspaces = workspaces if base.is_plain else None
        self._config = gemm_config_of(weights)

    def _add(self, _: Linear, x: Tensor) -> Tensor:
        own, weights, base = self._tiles.of(x.shape[0]), self._weights, self._base
        if self._workspaces and self._config and x.shape[0] <= MAX_ROWS and not self._tiles.has_prompts:
            for_gemm, for_shrink = self._workspaces
            h = tile_shrink(x, weights, own, for_shrink)
            return adapted_gemm(x, base.weight, base.bias, h, weights, own, for_gemm, self._config)
        config = config_of(weights)
        h = shrink(x, weights, own, config)
        y = self._plain(x)
        expand(y, h, weights, own, config)
        return y

    def gated(self, num_rows: int, is_gelu: bool) -> LinearLayer | None:
        """See Linear."""
        base, weights, workspaces = self._base, self._weights, self._workspaces
        if workspaces is None or not takes_gated_rows(num_rows, weights):
            return None

        def run(x: Tensor) -> Tensor:
            own = self._tiles.of(x.shape[0])
            h = tile_shrink(x, weights, own, workspaces[1])
            return gated_rows(x, base.weight, base.bias, h, weights, own, is_gelu)

        return run
