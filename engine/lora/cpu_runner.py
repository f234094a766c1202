"""A CPU's runner whose steps mix rows of several adapters and rows of the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
from torch import Tensor

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.cpu.batch import StepBatch
from engine.cpu.runner import CpuRunner, Forwards
from engine.engine import DeviceLostError
from engine.layers.block import Step
from engine.layers.forward import Forward
from engine.loader.load import LoadedModel
from engine.lora.cpu_layers import AdaptedForwards, AdapterRows, CpuAdapter, groups_of
from engine.lora.store import AdapterStore
from engine.plan import CompletedStep, PendingStep, StepPlan, StepResult
from engine.ranks import SINGLE, RankContext, Seams
from engine.request_states import RequestState


class LoraCpuRunner(CpuRunner):
    """A step without a row that names an adapter is computed as without this wing."""

    def __init__(
        self,
        adapters: AdapterStore[CpuAdapter],
        loaded: LoadedModel,
        kv_pool: Tensor,
        host_buffer: Tensor | None,
        config: EngineConfig,
        ranks: RankContext[Seams] = SINGLE,
    ) -> None:
        self._is_alone = loaded.shard.size == 1
        self._adapters = adapters
        self._rows = AdapterRows()
        super().__init__(loaded, kv_pool, host_buffer, config, ranks)

    def _lower(self, loaded: LoadedModel, ranks: RankContext[Seams]) -> Forwards:
        return AdaptedForwards(loaded.model, self._rows, ranks, self._batch_invariant)

    def _launch(self, plan: StepPlan, requests: Sequence[RequestState]) -> PendingStep:
        errors = self._take_adapters(requests)
        if not errors:
            return super()._launch(plan, requests)
        others = [index for index in range(len(requests)) if index not in errors]
        step = super()._launch(
            msgspec.structs.replace(plan, rows=[plan.rows[i] for i in others]), [requests[i] for i in others]
        )
        result = StepResult.of_rows(len(requests))
        result.put(others, step.result())
        result.errors |= errors
        return CompletedStep(result)

    def _take_adapters(self, requests: Sequence[RequestState]) -> dict[int, str]:
        """Give requests the adapters that they name. Returns the errors of those whose adapter cannot be read.

        Raises DeviceLostError for a rank of several, which would leave others waiting for the row's share.
        """
        errors = {}
        for index, request in enumerate(requests):
            if request.adapter and request.adapter_weights is None:
                try:
                    request.adapter_weights = self._adapters.get(request.adapter)
                except ConfigError as error:
                    if not self._is_alone:
                        raise DeviceLostError(f"a rank cannot read an adapter: {error}") from error
                    errors[index] = str(error)
        return errors

    def _forward_for(self, batch: StepBatch) -> Forward[Step, Tensor]:
        adapters = [request.adapter_weights for request in batch.requests]
        rows = [range(*ends) for ends in pairwise(batch.query_starts)]
        self._rows.groups = groups_of(zip(adapters, rows, strict=True), batch.num_tokens)
        self._rows.head = None  # log-probabilities of prompts are asked for without adapters of the head
        return super()._forward_for(batch)

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
