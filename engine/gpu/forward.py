"""One forward pass on a GPU over a KV pool: the model's ops for the step, and attention, where K and V live.

Static shapes, no host reads: a pass over decode rows only can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.gpu.attention.backend import PrefillAttention, PrefillPlan
from engine.gpu.attention.latents import PagedLatents
from engine.gpu.attention.paged import PagedAttention, PagedPlan
from engine.gpu.group import DeviceGroup
from engine.gpu.lowering import GpuForwards
from engine.gpu.ops.form import GpuStep
from engine.layers.attention import Attention
from engine.layers.latent_attention import LATENT_NORM_EPS, LatentAttention
from engine.layers.pipeline import Inbox
from engine.models.model import Model
from kernels.gpu.kv_splits import DecodeWorkspace
from kernels.gpu.latent_decode import latent_decode
from kernels.gpu.latent_rope import rotate_and_write_latents
from kernels.gpu.paged_decode import paged_decode
from kernels.gpu.rope import rope_and_write_kv


@dataclass(slots=True)
class GpuInputs:
    """Tokens of a step on the device: those of decode rows first, one each, then chunks of prompts.

    token_ids int64, positions and slots int32: (num_tokens,). slots: block id * block_size + offset, or -1 to store
        nothing.
    decode_tables: block ids, int32 (num_decode_rows, max_blocks).
    lengths: int32 (num_decode_rows,), 0 for rows without a request.
    prefill: `FusedForward.attention`'s plan for the chunks of prompts, or one for the paged kernel; None when there
        are none.
    attended: takes attention's output (num_tokens or more, num_heads * head_dim) in every layer; what it holds for
        tokens in no tile stays. None: fresh memory, where that is undefined.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    decode_tables: Tensor
    lengths: Tensor
    prefill: PrefillPlan | PagedPlan | None = None
    attended: Tensor | None = None


class FusedForward:
    """The model over one pool. Its workspaces serve one stream. `attention` plans and attends for prompts."""

    def __init__(
        self,
        model: Model,
        pool: Tensor,
        max_rows: int,
        attention: PrefillAttention,
        group: DeviceGroup | None = None,
        inbox: Inbox | None = None,
        passes_on: bool = False,
    ) -> None:
        """group: of the ranks that have the other shards of the model.

        inbox: of the model's later stage. passes_on: it is not the last one.
        """
        config = model.config
        self._rotary = model.rotary
        self._pool = pool
        # Of attention's output, which is absorbed latents where a model has those.
        head_dim = config.head_dim if config.latent is None else config.latent.kv_lora_rank
        self._workspace = DecodeWorkspace(max_rows, config.num_heads, config.num_kv_heads, head_dim, pool.device)
        self._forwards = GpuForwards(model, group, passes_on)
        self._inbox = inbox
        self.passes_on = passes_on
        self.attention = attention
        self.attention_width = config.num_heads * head_dim
        self.dtype = model.embedding.dtype
        self._window = config.windows[0] if config.windows else 0  # of all layers: others are not served here
        self._paged: PrefillAttention = PagedAttention(config.num_heads, config.num_kv_heads, self._window)
        self._latents = None if config.latent is None else PagedLatents(config.num_heads, config.latent)
        self.logits = model.head  # normed hidden states (rows, hidden) -> (rows, vocab), of this rank

    def hidden(self, inputs: GpuInputs) -> Tensor:
        """Hidden states (num_tokens, hidden) after the final norm; of a stage that passes them on, the residual."""
        token_ids = inputs.token_ids
        forward = self._forwards.choose(token_ids.shape[0], inputs.prefill is None)
        if self._inbox is not None:
            token_ids = self._inbox.token_ids(token_ids.shape[0])
        return forward.hidden(
            GpuStep(token_ids, partial(self._attend, inputs), partial(self._attend_latents, inputs))
        )

    def _attend(self, inputs: GpuInputs, block: Attention, qkv: Tensor, spreads_next: bool = True) -> Tensor:
        """See `Attend`."""
        rope_and_write_kv(
            qkv, self._rotary, inputs.positions, inputs.slots, block.qk_norm, block.eps, self._pool, block.layer,
            spreads_next=spreads_next,
        )  # fmt: skip
        if qkv.dim() == 4:
            qkv = qkv[0]  # the sum of the partials
        q, layer = qkv[:, : block.num_heads], block.layer
        if inputs.prefill is None:
            return self._attend_decode(q, layer, inputs)
        num_decode = inputs.lengths.shape[0]
        out = inputs.attended
        if out is None:
            out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if num_decode:
            out[:num_decode] = self._attend_decode(q[:num_decode], layer, inputs)
        attention = self._paged if isinstance(inputs.prefill, PagedPlan) else self.attention
        attention.prefill(qkv[num_decode:], self._pool, layer, inputs.prefill, out[num_decode:])
        return out

    def _attend_decode(self, q: Tensor, layer: int, inputs: GpuInputs) -> Tensor:
        return paged_decode(
            q, self._pool, layer, inputs.decode_tables, inputs.lengths, self._workspace, window=self._window
        )

    def _attend_latents(self, inputs: GpuInputs, block: LatentAttention, q: Tensor, latents: Tensor) -> Tensor:
        """See `AttendLatents`."""
        assert self._latents is not None, "the model's config has latents, as its blocks do"
        num_tokens, num_heads, rank = q.shape[0], block.num_heads, block.rank
        absorbed = torch.empty(num_tokens, num_heads, latents.shape[1], dtype=q.dtype, device=q.device)
        rotate_and_write_latents(
            q, latents, block.kv_norm, LATENT_NORM_EPS, self._rotary, inputs.positions, inputs.slots, absorbed,
            self._pool, block.layer,
        )  # fmt: skip
        q_nope = q[..., : block.nope_dim].transpose(0, 1)
        torch.bmm(q_nope, block.w_uk, out=absorbed[..., :rank].transpose(0, 1))
        num_decode, attended = inputs.lengths.shape[0], inputs.attended
        if attended is None:
            attended = torch.empty(num_tokens, num_heads * rank, dtype=q.dtype, device=q.device)
        if num_decode:
            attended[:num_decode] = latent_decode(
                absorbed[:num_decode], self._pool, rank, self._latents.scale, block.layer, inputs.decode_tables,
                inputs.lengths, self._workspace,
            )  # fmt: skip
        if inputs.prefill is not None:
            self._latents.prefill(
                absorbed[num_decode:], self._pool, block.layer, inputs.prefill, attended[num_decode:]
            )
        out = torch.empty(num_tokens, num_heads, block.v_dim, dtype=q.dtype, device=q.device)
        by_head = attended.view(num_tokens, num_heads, rank).transpose(0, 1)
        torch.bmm(by_head, block.w_uv.transpose(1, 2), out=out.transpose(0, 1))
        return out.flatten(1)
