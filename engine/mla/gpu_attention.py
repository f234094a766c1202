"""Attention over the pool's latents on a GPU, absorbed, or expanded for prompts where that is cheaper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.gpu.attention.backend import GpuAttention, GpuInputs
from engine.mla.gpu_expanded import ExpandedLatents, open_latents
from engine.mla.gpu_latents import AbsorbedPlan, ExpandedPlan, LatentPlan, PagedLatents
from engine.mla.latent_attention import LATENT_NORM_EPS, LatentAttention
from engine.models.model import Model
from kernels.gpu.attention.paged_prefill import TileSplits
from kernels.gpu.mla.latent_decode import latent_decode, latent_workspace, plan_latents
from kernels.gpu.mla.latent_rope import rotate_and_write_latents


class LatentQueries(GpuAttention):
    """See GpuAttention."""

    prefill: PagedLatents

    def __init__(
        self, model: Model, pool: Tensor, max_rows: int, wanted: str, dtype: torch.dtype, max_tokens: int
    ) -> None:
        config, latent = model.config, model.config.latent
        assert latent is not None, "the model's config has latents, as its blocks do"
        self.prefill = (
            open_latents(wanted, pool, config.num_heads, latent, dtype)
            if max_tokens
            else PagedLatents(config.num_heads, latent)
        )
        self.name = self.prefill.name
        self._rotary, self._pool, self._num_heads = model.rotary, pool, config.num_heads
        self.width = config.num_heads * latent.kv_lora_rank  # width of absorbed queries' outputs
        self._workspace = latent_workspace(max_rows, config.num_heads, latent.kv_lora_rank, pool.device)

    def plan(
        self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Tensor]
    ) -> Sequence[LatentPlan]:
        return [self.prefill.plan(query_starts, seq_lens, tables) for tables in block_tables]

    def graph_plan(self, block_tables: Tensor, tiles: Tensor, splits: TileSplits | None = None) -> AbsorbedPlan:
        return AbsorbedPlan(block_tables, tiles)

    def plan_decode(self, inputs: GpuInputs) -> None:
        if inputs.lengths.shape[0]:
            inputs.groups[0].decode = plan_latents(inputs.lengths, self._num_heads, self._pool.itemsize)

    def attend(self, inputs: GpuInputs, block: LatentAttention, q: Tensor, latents: Tensor) -> Tensor:
        """See GpuAttention: norm and rotate, absorb, store latents, attend.

        q: (num_tokens, num_heads, nope_dim + rope_dim); latents: (num_tokens, rank + rope_dim), before the norm, with
        rows of any stride, read-only. Returns (num_tokens, num_heads * v_dim).
        """
        [own] = inputs.groups
        num_tokens, num_heads, rank = q.shape[0], block.num_heads, block.rank
        num_decode, attended = inputs.lengths.shape[0], inputs.attended
        expanded = own.prefill if isinstance(own.prefill, ExpandedPlan) else None
        num_absorbed = num_tokens if expanded is None else num_decode
        if attended is None:  # for all tokens, so that trials of expanded prompts measure the memory of absorbed ones
            attended = torch.empty(num_tokens, num_heads * rank, dtype=q.dtype, device=q.device)
        absorbed = torch.empty(num_tokens, num_heads, latents.shape[1], dtype=q.dtype, device=q.device)
        rotate_and_write_latents(
            q, latents, block.kv_norm, LATENT_NORM_EPS, self._rotary, inputs.positions, own.slots, absorbed,
            self._pool, block.layer,
        )  # fmt: skip
        out = torch.empty(num_tokens, num_heads, block.v_dim, dtype=q.dtype, device=q.device)
        if expanded is not None:
            assert isinstance(self.prefill, ExpandedLatents), "it made the plan"
            prompts = q[num_decode:]
            prompts[..., block.nope_dim :] = absorbed[num_decode:, :, rank:]
            self.prefill.attend(prompts, block.kv_b, self._pool, block.layer, expanded, out[num_decode:])
            if not num_decode:
                return out.flatten(1)
        q_nope = q[:num_absorbed, :, : block.nope_dim].transpose(0, 1)
        torch.bmm(q_nope, block.w_uk, out=absorbed[:num_absorbed, :, :rank].transpose(0, 1))
        if num_decode:
            attended[:num_decode] = latent_decode(
                absorbed[:num_decode], self._pool, rank, self.prefill.scale, block.layer, own.decode_tables,
                inputs.lengths, own.decode, self._workspace,
            )  # fmt: skip
        if num_absorbed > num_decode:
            self.prefill.prefill(absorbed[num_decode:], self._pool, block.layer, own.prefill, attended[num_decode:])
        by_head = attended[:num_absorbed].view(num_absorbed, num_heads, rank).transpose(0, 1)
        torch.bmm(by_head, block.w_uv.transpose(1, 2), out=out[:num_absorbed].transpose(0, 1))
        return out.flatten(1)
