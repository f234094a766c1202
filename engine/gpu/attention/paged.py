"""The backend that always works: our Triton kernel, which reads K and V where they lie in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.gpu.inputs import upload
from kernels.gpu.paged_prefill import paged_prefill, prefill_tiles


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """block_tables: int32 (num_rows, any). tiles: int32 (num_tiles, 4), from `prefill_tiles`."""

    block_tables: Tensor
    tiles: Tensor


class PagedAttention:
    """`kernels.gpu.paged_prefill`; group: query heads per KV head."""

    name = "triton"

    def __init__(self, group: int) -> None:
        self._group = group

    def plan(
        self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor, skipped: Sequence[bool] = ()
    ) -> PagedPlan:
        """skipped: of each row, whether somebody else attends for it."""
        tiles = prefill_tiles(query_starts, seq_lens, self._group)
        if any(skipped):
            tiles = [tile for tile in tiles if not skipped[tile[0]]]
        return PagedPlan(block_tables, upload(tiles, torch.int32, block_tables.device).view(-1, 4))

    def prefill(self, qkv: Tensor, pool: Tensor, layer: int, plan: PagedPlan, out: Tensor) -> None:
        q = qkv[:, : qkv.shape[1] - 2 * pool.shape[3]]
        paged_prefill(q, pool, layer, plan.block_tables, plan.tiles, out=out)
