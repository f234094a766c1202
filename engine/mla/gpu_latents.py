"""Prompts of models with latent attention: our Triton kernel over the pool's latents, in the absorbed form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.gpu.attention.backend import PrefillPlan
from engine.gpu.attention.paged import PagedPlan
from engine.gpu.pinning import upload
from engine.models.config import LatentConfig
from kernels.gpu.attention.paged_prefill import prefill_tiles
from kernels.gpu.mla.latent_prefill import TILE_M, heads_of_tile, latent_prefill


class PagedLatents:
    """A `PrefillAttention` that is given absorbed queries alone: (num_tokens, num_heads, rank + rotated)."""

    name = "triton"

    def __init__(self, num_heads: int, latent: LatentConfig) -> None:
        self.rank = latent.kv_lora_rank
        self.scale = latent.mscale**2 / math.sqrt(latent.nope_head_dim + latent.rope_head_dim)
        self._heads_of_tile = heads_of_tile(num_heads)

    def plan(self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor) -> PrefillPlan:
        tiles = prefill_tiles(query_starts, seq_lens, self._heads_of_tile, TILE_M)
        return PagedPlan(block_tables, upload(tiles, torch.int32, block_tables.device).view(-1, 4), TILE_M)

    def prefill(self, qkv: Tensor, pool: Tensor, layer: int, plan: PagedPlan, out: Tensor) -> None:
        latent_prefill(qkv, pool, self.rank, self.scale, layer, plan.block_tables, plan.tiles, out)
