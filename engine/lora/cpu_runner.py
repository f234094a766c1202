"""A CPU runner whose steps mix rows of several adapters with rows of the base model."""

from __future__ import annotations

from torch import Tensor

from engine.config import EngineConfig
from engine.cpu.batch import StepBatch
from engine.cpu.runner import CpuRunner
from engine.cpu_forms.settings import FormSettings
from engine.layers.block import Step
from engine.layers.forward import Forward
from engine.loader.load import LoadedModel
from engine.lora.cpu_layers import AdaptedForwards, AdapterRows, CpuAdapter, groups_of
from engine.lora.runner import AdaptedSteps
from engine.lora.store import AdapterStore
from engine.plan import StepResult
from engine.ranks import SINGLE, RankContext, Seams
from kvstore.layout import WHOLE


class LoraCpuRunner(AdaptedSteps, CpuRunner):
    """A runner with adapters. A step in which no row names an adapter is computed as without this wing."""

    def __init__(
        self,
        adapters: AdapterStore[CpuAdapter],
        loaded: LoadedModel,
        kv_pool: Tensor,
        host_buffer: Tensor | None,
        config: EngineConfig,
        ranks: RankContext[Seams] = SINGLE,
    ) -> None:
        self._is_alone = loaded.shard == WHOLE
        self._adapters = adapters
        self._rows = AdapterRows()
        super().__init__(loaded, kv_pool, host_buffer, config, ranks)

    def _lower(self, loaded: LoadedModel, config: EngineConfig, ranks: RankContext[Seams]) -> AdaptedForwards:
        return AdaptedForwards(loaded.model, self._rows, ranks, config.of(FormSettings).batch_invariant)

    def _add_samples(
        self, forward: Forward[Step, Tensor], batch: StepBatch, hidden: Tensor, result: StepResult
    ) -> None:
        ranges, end = [], 0
        for row, request in zip(batch.rows, batch.requests, strict=True):
            if row.samples:
                begin, end = end, end + 1 + len(row.draft_token_ids)
                ranges.append((request.adapter_weights, range(begin, end)))
        self._rows.head = groups_of(ranges, end)
        super()._add_samples(forward, batch, hidden, result)
