"""A GPU runner whose steps mix rows of several adapters with rows of the base model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.gpu.lowering import Observer
from engine.gpu.runner import GpuRunner, collector_paused, split_rows
from engine.gpu.steps.rows import MAX_GRAPH_TOKENS
from engine.gpu.steps.step import GpuBatch, GpuStep
from engine.loader.load import LoadedModel
from engine.lora.gpu_layers import AdaptedForwards, AdapterTiles, with_slots
from engine.lora.gpu_slots import FollowedSlots, GpuSlots, SlotStore
from engine.lora.runner import AdaptedSteps
from engine.plan import ScheduledRow
from engine.request_states import RequestState
from engine.wings import OnProgress, no_progress
from kernels.gpu.lora.row_tiles import NOTHING
from kvstore.layout import WHOLE

if TYPE_CHECKING:
    from engine.prompt_graphs.graphs import PromptGraphs


class LoraGpuRunner(AdaptedSteps, GpuRunner):
    """A runner with adapters. Steps in which no row names an adapter run as without this wing, in separate graphs."""

    def __init__(self, adapters: SlotStore, slots: GpuSlots, loaded: LoadedModel, *args: Any) -> None:
        """args: the other arguments of GpuRunner."""
        super().__init__(loaded, *args)
        self._adapters, self._is_alone = adapters, loaded.shard == WHOLE
        self._adapted_prompts: PromptGraphs | None = None
        self._tiles = AdapterTiles(slots, max(self._max_rows, MAX_GRAPH_TOKENS), loaded.device)
        model = self._ranks.inbox.model(with_slots(loaded.model, slots, self._tiles))
        forward = self._forward.of_ops(AdaptedForwards(model, self._ranks))
        self._plain = self._forward, self._decodes
        self._adapted = forward, self._open_decodes(forward)
        self._has_adapters = False  # whether the step being queued has adapters
        self._warms_up = False  # the warm-up runs steps with adapters though no request has any

    def observe_with(self, observer: Observer) -> None:
        """See GpuRunner."""
        for forward, _ in (self._plain, self._adapted):
            forward.observe_with(observer)

    @torch.inference_mode()
    def capture(self, on_progress: OnProgress = no_progress) -> None:
        """See GpuRunner; also captures steps with adapters."""
        super().capture(on_progress)
        self._adapted[1].capture(on_progress)
        if self.prompt_graphs is not None:
            with collector_paused():
                self.open_adapted_prompts()

    def open_adapted_prompts(self, captures: bool = True) -> None:
        """Make graphs of steps with prompts and adapters; without graphs these run eagerly."""
        plain, self._forward = self._forward, self._adapted[0]
        self._adapted_prompts = self.open_prompt_graphs(captures)
        self._forward = plain

    def _run_warmup_plans(self) -> None:
        for self._warms_up in (False, True):
            super()._run_warmup_plans()
        self._warms_up = False
        self._forward, self._decodes = self._plain

    def _take_adapters(self, requests: Sequence[RequestState]) -> dict[int, str]:
        if isinstance(self._adapters, FollowedSlots):  # slots are reassigned between steps
            for request in requests:
                request.adapter_weights = None
        return super()._take_adapters(requests)

    def _launch_rows(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> GpuStep:
        self._has_adapters = self._warms_up or any(each.adapter_weights is not None for each in requests)
        self._forward, self._decodes = self._adapted if self._has_adapters else self._plain
        return super()._launch_rows(rows, requests)

    def _queue_decode(self, batch: GpuBatch, step: GpuStep) -> None:
        if self._has_adapters:
            slots, (of_row, places, num_places) = slots_of(batch.requests), self._decodes.places(batch)
            self._tiles.put([slots[i] for i in of_row], places, num_places)
        super()._queue_decode(batch, step)

    def _graphs_of_prompts(self) -> PromptGraphs | None:
        return self._adapted_prompts if self._has_adapters else self.prompt_graphs

    def _queue_prompts(self, batch: GpuBatch, graphs: PromptGraphs, step: GpuStep) -> None:
        if self._has_adapters:
            slots, rows, order = slots_of(batch.requests), batch.rows, graphs.order(batch)
            of_tokens = [slots[i] for i in order for _ in range(rows[i].num_tokens)]
            sampled = [slots[i] for i in order if rows[i].samples]
            num_tokens, num_samples = graphs.shape_of(batch)
            self._tiles.tokens.put(of_tokens, range(len(of_tokens)), num_tokens)
            self._tiles.put_sampled(sampled, range(len(sampled)), num_samples)
        super()._queue_prompts(batch, graphs, step)

    def _queue_mixed(self, batch: GpuBatch, step: GpuStep) -> None:
        if not self._has_adapters:
            super()._queue_mixed(batch, step)
            return
        slots, rows = slots_of(batch.requests), batch.rows
        order = [index for part in split_rows(rows) for index in part]
        counts, sampled = [rows[i].num_tokens for i in order], [slots[i] for i in order if rows[i].samples]
        with self._tiles.of_prompts([slots[i] for i in order], counts, sampled or [NOTHING]):
            super()._queue_mixed(batch, step)

    def _logits(self, hidden: Tensor) -> Tensor:
        """See GpuRunner: for prompts whose adapters do not change the head."""
        with self._tiles.of_head([NOTHING]):
            return super()._logits(hidden)


def slots_of(requests: Sequence[RequestState]) -> list[int]:
    return [NOTHING if request.adapter_weights is None else request.adapter_weights for request in requests]
