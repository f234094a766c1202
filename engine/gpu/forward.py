"""One forward pass on a GPU over a KV pool: the model's ops for the step, and attention, where K and V live.

Static shapes, no host reads: a pass over decode rows only can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.gpu.attention.backend import PrefillAttention, PrefillPlan
from engine.gpu.attention.paged import PagedAttention, PagedPlan
from engine.gpu.lowering import SINGLE_GPU, GpuForwards, GpuSeams
from engine.gpu.ops.form import GpuStep
from engine.kv.memory import kv_layout
from engine.layers.attention import Attention
from engine.mla.gpu_expanded import ExpandedLatents, ExpandedPlan
from engine.mla.gpu_latents import PagedLatents
from engine.mla.latent_attention import LATENT_NORM_EPS, LatentAttention
from engine.models.model import Model
from engine.ranks import RankContext
from kernels.gpu.attention.kv_splits import DecodeWorkspace
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.elementwise.rope import rope_and_write_kv
from kernels.gpu.mla.latent_decode import latent_decode
from kernels.gpu.mla.latent_rope import rotate_and_write_latents
from kvstore.layout import KvLayout


@dataclass(slots=True)
class GroupInputs:
    """Where the layers of one KV group store a step's K and V, and find those that it reads.

    slots: int32 (num_tokens,), block id * block_size + offset, or -1 to store nothing.
    decode_tables: block ids, int32 (num_decode_rows, max_blocks).
    prefill: `FusedForward.attention`'s plan for the chunks of prompts, or one for the paged kernel; None when there
        are none.
    """

    slots: Tensor
    decode_tables: Tensor
    prefill: PrefillPlan | PagedPlan | None = None


@dataclass(slots=True)
class GpuInputs:
    """Tokens of a step on the device: those of decode rows first, one each, then chunks of prompts.

    token_ids int64, positions int32: (num_tokens,).
    lengths: int32 (num_decode_rows,), 0 for rows without a request.
    groups: of each KV group; all have chunks of prompts, or none has.
    attended: takes attention's output (num_tokens or more, num_heads * head_dim) in every layer; what it holds for
        tokens in no tile stays. None: fresh memory, where that is undefined.
    """

    token_ids: Tensor
    positions: Tensor
    lengths: Tensor
    groups: Sequence[GroupInputs]
    attended: Tensor | None = None

    @property
    def has_prompts(self) -> bool:
        return self.groups[0].prefill is not None


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What a layer's attention needs of the model: its KV group and its index there, its window (0: none), and the
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


class FusedForward:
    """The model over one pool. Its workspaces serve one stream. `attention` plans and attends for prompts."""

    def __init__(
        self,
        model: Model,
        pool: Tensor,
        max_rows: int,
        attention: PrefillAttention,
        ranks: RankContext[GpuSeams] = SINGLE_GPU,
    ) -> None:
        model, config = ranks.inbox.model(model), model.config
        self._rotary = model.rotary
        self._layers = layers_of(model, kv_layout(config, pool.dtype))
        self._pool = pool
        # Of attention's output, which is absorbed latents where a model has those.
        head_dim = config.head_dim if config.latent is None else config.latent.kv_lora_rank
        self._workspace = DecodeWorkspace(max_rows, config.num_heads, config.num_kv_heads, head_dim, pool.device)
        self._forwards = GpuForwards(model, ranks)
        self._inbox = ranks.inbox
        self.passes_on = ranks.passes_on
        self.attention = attention
        self.attention_width = config.num_heads * head_dim
        self.dtype = model.embedding.dtype
        self._paged = PagedAttention(config.num_heads, config.num_kv_heads)
        self._latents = None if config.latent is None else PagedLatents(config.num_heads, config.latent)
        self.logits = model.head  # normed hidden states (rows, hidden) -> (rows, vocab), of this rank

    def hidden(self, inputs: GpuInputs) -> Tensor:
        """Hidden states (num_tokens, hidden) after the final norm; of a stage that passes them on, the residual."""
        token_ids = self._inbox.token_ids(inputs.token_ids)
        forward = self._forwards.choose(token_ids.shape[0], not inputs.has_prompts)
        attend, attend_latents = partial(self._attend, inputs), partial(self._attend_latents, inputs)
        return forward.hidden(GpuStep(token_ids, inputs.groups[0].slots, attend, attend_latents))

    def _attend(self, inputs: GpuInputs, block: Attention, qkv: Tensor, spreads_next: bool = True) -> Tensor:
        """See `Attend`."""
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
            return self._attend_decode(q, block, own, inputs.lengths)
        num_decode = inputs.lengths.shape[0]
        out = inputs.attended
        if out is None:
            out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if num_decode:
            out[:num_decode] = self._attend_decode(q[:num_decode], block, own, inputs.lengths)
        prompts, their_out = qkv[num_decode:], out[num_decode:]
        if isinstance(own.prefill, PagedPlan):
            self._paged.prefill(
                prompts, self._pool, layer.index, own.prefill, their_out, layer.window, block.sinks
            )  # fmt: skip
        else:
            self.attention.prefill(prompts, self._pool, layer.index, own.prefill, their_out)
        return out

    def _attend_decode(self, q: Tensor, block: Attention, own: GroupInputs, lengths: Tensor) -> Tensor:
        layer = self._layers[block.layer]
        return paged_decode(
            q, self._pool, layer.index, own.decode_tables, lengths, self._workspace, window=layer.window,
            sinks=block.sinks,
        )  # fmt: skip

    def _attend_latents(self, inputs: GpuInputs, block: LatentAttention, q: Tensor, latents: Tensor) -> Tensor:
        """See `AttendLatents`."""
        assert self._latents is not None, "the model's config has latents, as its blocks do"
        [own] = inputs.groups
        num_tokens, num_heads, rank = q.shape[0], block.num_heads, block.rank
        num_decode, attended = inputs.lengths.shape[0], inputs.attended
        num_absorbed = num_decode if isinstance(own.prefill, ExpandedPlan) else num_tokens
        if attended is None:  # of all tokens, so that a trial of expanded prompts measures what absorbed ones need
            attended = torch.empty(num_tokens, num_heads * rank, dtype=q.dtype, device=q.device)
        absorbed = torch.empty(num_tokens, num_heads, latents.shape[1], dtype=q.dtype, device=q.device)
        rotate_and_write_latents(
            q, latents, block.kv_norm, LATENT_NORM_EPS, self._rotary, inputs.positions, own.slots, absorbed,
            self._pool, block.layer,
        )  # fmt: skip
        out = torch.empty(num_tokens, num_heads, block.v_dim, dtype=q.dtype, device=q.device)
        if isinstance(own.prefill, ExpandedPlan):
            assert isinstance(self.attention, ExpandedLatents), "it made the plan"
            prompts = q[num_decode:]
            prompts[..., block.nope_dim :] = absorbed[num_decode:, :, rank:]
            self.attention.attend(prompts, block.kv_b, self._pool, block.layer, own.prefill, out[num_decode:])
            if not num_decode:
                return out.flatten(1)
        q_nope = q[:num_absorbed, :, : block.nope_dim].transpose(0, 1)
        torch.bmm(q_nope, block.w_uk, out=absorbed[:num_absorbed, :, :rank].transpose(0, 1))
        if num_decode:
            attended[:num_decode] = latent_decode(
                absorbed[:num_decode], self._pool, rank, self._latents.scale, block.layer, own.decode_tables,
                inputs.lengths, self._workspace,
            )  # fmt: skip
        if isinstance(own.prefill, PagedPlan):
            self._latents.prefill(absorbed[num_decode:], self._pool, block.layer, own.prefill, attended[num_decode:])
        by_head = attended[:num_absorbed].view(num_absorbed, num_heads, rank).transpose(0, 1)
        torch.bmm(by_head, block.w_uv.transpose(1, 2), out=out[:num_absorbed].transpose(0, 1))
        return out.flatten(1)
