"""The backend that always works: our Triton kernel, which reads K and V where they lie in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.gpu.pinning import upload
from kernels.gpu.attention.paged_prefill import TileSplits, paged_prefill
from kernels.gpu.attention.prompt_tiles import choose_tile, prefill_tiles


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """block_tables: int32 (num_rows, any). tiles, splits: see `paged_prefill`."""

    block_tables: Tensor
    tiles: Tensor
    tile_m: int
    splits: TileSplits | None = None

    def attend(
        self, qkv: Tensor, pool: Tensor, layer: int, out: Tensor, window: int = 0, sinks: Tensor | None = None
    ) -> None:
        """See PrefillPlan."""
        q = qkv[:, : qkv.shape[1] - 2 * pool.shape[3]]
        paged_prefill(
            q, pool, layer, self.block_tables, self.tiles, self.tile_m, out, window=window, sinks=sinks,
            splits=self.splits,
        )  # fmt: skip


class PagedAttention:
    """`kernels.gpu.attention.paged_prefill`."""

    name = "triton"

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self._num_heads = num_heads
        self._group = num_heads // num_kv_heads

    def plan(
        self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor, skipped: Sequence[bool] = ()
    ) -> PagedPlan:
        """skipped: of each row, whether somebody else attends for it."""
        tile_m = choose_tile(query_starts[-1], self._num_heads, block_tables.device)
        tiles = prefill_tiles(query_starts, seq_lens, self._group, tile_m)
        if any(skipped):
            tiles = [tile for tile in tiles if not skipped[tile[0]]]
        return PagedPlan(block_tables, upload(tiles, torch.int32, block_tables.device).view(-1, 4), tile_m)
