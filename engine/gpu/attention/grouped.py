"""Grouped-query attention of a model's blocks on a GPU, over K and V in the pool."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from common.wings import has_wing, require_wing
from engine.gpu.attention.backend import (
    GpuAttention,
    GpuInputs,
    GroupInputs,
    PagedAttention,
    PagedPlan,
    PrefillAttention,
    PrefillPlan,
)
from engine.kv.memory import kv_layout
from engine.layers.attention import Attention
from engine.models.model import Model
from kernels.gpu.attention.decode_plan import DecodePlan, plan_decode
from kernels.gpu.attention.kv_splits import DecodeWorkspace
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.attention.paged_prefill import TileSplits
from kernels.gpu.attention.prompt_tiles import SMALL_TILE
from kernels.gpu.elementwise.rope import rope_and_write_kv
from kvstore.layout import KvLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What attention needs to know about a layer: its KV group, its index in the group, its window (0: none) and its
    rotary table.
    """

    group: int
    index: int
    window: int
    rotary: Tensor


def layers_of(model: Model, layout: KvLayout) -> dict[int, LayerKv]:
    local = model.rotary if model.local_rotary is None else model.local_rotary
    return {
        layer: LayerKv(number, index, group.window, local if group.window else model.rotary)
        for number, group in enumerate(layout.groups)
        for index, layer in enumerate(group.layers)
    }


def open_attention(
    wanted: str, pool: Tensor, num_heads: int, dtype: torch.dtype, max_tokens: int, needs: str = ""
) -> PrefillAttention:
    """Open the prefill backend over one pool. Raises ConfigError.

    max_tokens: of the largest step. needs: a feature of the model that only our own kernel supports, or "".
    """
    if needs and wanted not in ("auto", "triton"):
        raise ConfigError(f"--attention-backend {wanted} knows no {needs}; use triton")
    backend: PrefillAttention = PagedAttention(num_heads, pool.shape[3])
    if not needs and wanted != "triton" and (wanted != "auto" or has_wing("engine.prefill_backends")):
        require_wing("engine.prefill_backends", f"--attention-backend {wanted}")
        from engine.prefill_backends.choose import open_chosen

        backend = open_chosen(wanted, pool, num_heads, dtype, max_tokens)
    logger.info("prefill attention: %s", backend.name)
    return backend


class GroupedQueries(GpuAttention):
    """See GpuAttention."""

    def __init__(
        self, model: Model, pool: Tensor, max_rows: int, wanted: str, dtype: torch.dtype, max_tokens: int
    ) -> None:
        config, layout = model.config, kv_layout(model.config, pool.dtype)
        has_sinks = any(isinstance(each, Attention) and each.sinks is not None for each in model.blocks)
        needs = "sliding windows" if layout.has_windows else "attention sinks" if has_sinks else ""
        self._prefill: PrefillAttention
        if config.is_causal:
            self._prefill = open_attention(wanted, pool, config.num_heads, dtype, max_tokens, needs)
        else:
            from engine.bidirectional.gpu_attention import BidirectionalPrefill

            self._prefill = BidirectionalPrefill()
        self.name = self._prefill.name
        self._layers = layers_of(model, layout)
        self._pool = pool
        self.width = config.num_heads * config.head_dim
        self._num_heads = config.num_heads
        self._windows = [group.window for group in layout.groups]
        self._workspace = DecodeWorkspace(
            max_rows, config.num_heads, config.num_kv_heads, config.head_dim, pool.device, self.most_queries
        )  # fmt: skip
        self.split_shape = config.num_kv_heads, config.head_dim

    def plan(
        self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Tensor]
    ) -> Sequence[PrefillPlan]:
        """See GpuAttention. With several groups the paged kernel runs all of them, with one table each."""
        plan: Any = self._prefill.plan(query_starts, seq_lens, block_tables[0])
        return [plan, *(replace(plan, block_tables=tables) for tables in block_tables[1:])]

    def graph_plan(self, block_tables: Tensor, tiles: Tensor, splits: TileSplits | None = None) -> PrefillPlan:
        return PagedPlan(block_tables, tiles, SMALL_TILE, splits)

    def plan_decode(self, inputs: GpuInputs) -> None:
        """See GpuAttention. Groups with the same window share a plan."""
        if not inputs.lengths.shape[0]:
            return
        plans: dict[int, DecodePlan] = {}
        for own, window in zip(inputs.groups, self._windows, strict=True):
            if window not in plans:
                plans[window] = self._plan_of_window(inputs, window)
            own.decode = plans[window]

    def _plan_of_window(self, inputs: GpuInputs, window: int) -> DecodePlan:
        return plan_decode(inputs.lengths, self._num_heads, self._pool, window)

    def attend(self, inputs: GpuInputs, block: Attention, qkv: Tensor, spreads_next: bool = True) -> Tensor:
        """See GpuAttention. spreads_next: see `rope_and_write_kv`.

        qkv: (num_tokens, heads + 2 kv_heads, head_dim), changed in place, or split-K partials (num_splits, ...).
        """
        layer = self._layers[block.layer]
        own = inputs.groups[layer.group]
        rope_and_write_kv(
            qkv, layer.rotary, inputs.positions, own.slots, block.qk_norm, block.eps, self._pool, layer.index,
            spreads_next=spreads_next,
        )  # fmt: skip
        if qkv.dim() == 4:
            qkv = qkv[0]  # the sum of the partials
        q = qkv[:, : block.num_heads]
        if own.prefill is None:
            return self._attend_decode(q, block, own, inputs)
        num_decode = inputs.lengths.shape[0]
        out = inputs.attended
        if out is None:
            out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if num_decode:
            out[:num_decode] = self._attend_decode(q[:num_decode], block, own, inputs)
        prompts, plan = qkv[num_decode:], own.prefill
        plan.attend(prompts, self._pool, layer.index, out[num_decode:], layer.window, block.sinks)
        return out

    def _attend_decode(self, q: Tensor, block: Attention, own: GroupInputs, inputs: GpuInputs) -> Tensor:
        shared = self._pool, self._layers[block.layer].index, own.decode_tables, inputs.lengths
        return paged_decode(q, *shared, own.decode, self._workspace, block.sinks)
