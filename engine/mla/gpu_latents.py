"""Prompts of models with latent attention: our Triton kernel over the pool's latents, in the absorbed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.gpu.pinning import upload
from engine.mla.config import LatentConfig
from kernels.gpu.attention.prompt_tiles import prefill_tiles
from kernels.gpu.mla.latent_prefill import TILE_M, heads_of_tile, latent_prefill


@dataclass(frozen=True, slots=True)
class AbsorbedPlan:
    """The plan of absorbed prompts. block_tables, tiles: see PagedPlan."""

    block_tables: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True)
class ExpandedPlan:
    """The plan of expanded prompts: where a step's keys are, row by row; on the device.

    blocks, offsets: int64 (num_keys,), in the pool. query_starts, key_starts: int32 (num_rows + 1,). tiles: int32
    (num_tiles, 4), of our kernel; None for FlashAttention-3.
    """

    blocks: Tensor
    offsets: Tensor
    query_starts: Tensor
    key_starts: Tensor
    max_queries: int
    max_keys: int
    tiles: Tensor | None


LatentPlan = AbsorbedPlan | ExpandedPlan


class PagedLatents:
    """Plans and computes attention of absorbed queries only: (num_tokens, num_heads, rank + rotated)."""

    name = "triton"

    def __init__(self, num_heads: int, latent: LatentConfig) -> None:
        self.rank = latent.kv_lora_rank
        self.scale = latent.mscale**2 / math.sqrt(latent.nope_head_dim + latent.rope_head_dim)
        self._heads_of_tile = heads_of_tile(num_heads)

    def plan(self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor) -> LatentPlan:
        tiles = prefill_tiles(query_starts, seq_lens, self._heads_of_tile, TILE_M)
        return AbsorbedPlan(block_tables, upload(tiles, torch.int32, block_tables.device).view(-1, 4))

    def prefill(self, qkv: Tensor, pool: Tensor, layer: int, plan: AbsorbedPlan, out: Tensor) -> None:
        latent_prefill(qkv, pool, self.rank, self.scale, layer, plan.block_tables, plan.tiles, out)
