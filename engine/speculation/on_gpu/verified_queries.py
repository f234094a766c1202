"""Grouped-query attention for rows with several queries, which load keys and values once for a group of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.gpu.attention.backend import GpuInputs, GroupInputs
from engine.gpu.attention.grouped import GroupedQueries
from engine.layers.attention import Attention
from engine.models.model import Model
from kernels.gpu.attention.decode_plan import DecodePlan, plan_decode
from kernels.gpu.speculation.paged_verify import most_queries, paged_verify


def attention() -> type[GroupedQueries]:
    """Return the attention of models with grouped queries."""
    return VerifiedQueries


class VerifiedQueries(GroupedQueries):
    """Queries attend in groups if the step has any, see `GpuInputs.query_groups`; not with windows or sinks."""

    def __init__(self, model: Model, *args: Any) -> None:
        """args: the other arguments of GroupedQueries."""
        self.most_queries = most_queries(model.config.num_heads // model.config.num_kv_heads)
        self._has_sinks = any(isinstance(each, Attention) and each.sinks is not None for each in model.blocks)
        super().__init__(model, *args)

    def _plan_of_window(self, inputs: GpuInputs, window: int) -> DecodePlan:
        groups = inputs.query_groups
        if groups is None or not self._attends_in_groups(window):
            return super()._plan_of_window(inputs, window)
        return plan_decode(groups[0], self._num_heads, self._pool, window, groups, self.most_queries)

    def _attend_decode(self, q: Tensor, block: Attention, own: GroupInputs, inputs: GpuInputs) -> Tensor:
        layer, groups = self._layers[block.layer], inputs.query_groups
        if groups is None or not self._attends_in_groups(layer.window):
            return super()._attend_decode(q, block, own, inputs)
        shared = self._pool, layer.index, own.decode_tables, inputs.lengths
        return paged_verify(q, *shared, groups, own.decode, self._workspace)

    def _attends_in_groups(self, window: int) -> bool:
        return self.most_queries > 1 and not window and not self._has_sinks
