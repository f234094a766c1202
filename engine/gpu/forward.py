"""One forward pass with fused kernels over the same weights that `DecoderModel.forward` uses.

    residual += previous output, normed      one kernel
    q, k normed and rotated, k and v stored  one kernel
    attention                                one kernel for decode rows, one for chunks of prompts
    SiLU(gate) * up                          one kernel

Static shapes, no host reads: a pass over decode rows only can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from engine.gpu import rounded
from engine.gpu.attention.backend import PrefillAttention, PrefillPlan
from engine.gpu.linear import FewRows, fused_row, takes_fused_rows
from engine.gpu.preloaded import PreloadedLayers
from engine.layers.decoder import DecoderModel
from kernels.gpu.paged_decode import DecodeWorkspace, paged_decode
from kernels.gpu.preloaded_gemm import FEW_ROWS
from kernels.gpu.rms_norm import add_rms_norm, embed_rms_norm, rms_norm
from kernels.gpu.rope import rope_and_write_kv


@dataclass(slots=True)
class GpuInputs:
    """Tokens of a step on the device: those of decode rows first, one each, then chunks of prompts.

    token_ids int64, positions and slots int32: (num_tokens,). slots: block id * block_size + offset, or -1 to store
        nothing.
    decode_tables: block ids, int32 (num_decode_rows, max_blocks).
    lengths: int32 (num_decode_rows,), 0 for rows without a request.
    prefill: `FusedForward.attention`'s plan for the chunks of prompts; None when there are none.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    decode_tables: Tensor
    lengths: Tensor
    prefill: PrefillPlan | None = None


class FusedForward:
    """The model over one pool. Its workspace serves one stream. `attention` plans and attends for prompts."""

    def __init__(self, model: DecoderModel, pool: Tensor, max_rows: int, attention: PrefillAttention) -> None:
        config = model.config
        self._model = model
        self._pool = pool
        self._workspace = DecodeWorkspace(
            max_rows, config.num_heads, config.num_kv_heads, config.head_dim, pool.device
        )
        self.attention = attention
        self._linear = FewRows(pool.device)
        self._takes_fused_rows = takes_fused_rows(model)
        self._preloaded = PreloadedLayers(model)
        self._max_rounded = rounded.max_rows(model)

    def hidden(self, inputs: GpuInputs) -> Tensor:
        """Hidden states (num_tokens, hidden) after the final norm."""
        model = self._model
        config = model.config
        eps = config.rms_norm_eps
        num_tokens = inputs.token_ids.shape[0]
        if num_tokens <= self._max_rounded:
            return rounded.hidden(model, inputs.token_ids, partial(self._rotate_and_attend, inputs=inputs))
        if inputs.prefill is None and self._preloaded.takes(num_tokens):
            return self._preloaded.hidden(inputs.token_ids, partial(self._add_rotate_and_attend, inputs=inputs))
        if num_tokens == 1 and inputs.prefill is None and self._takes_fused_rows:
            return self._hidden_of_one(inputs)
        linear = self._linear
        residual, x = embed_rms_norm(inputs.token_ids, model.embedding, model.layers[0].attention_norm, eps)
        for index, layer in enumerate(model.layers):
            qkv = linear(layer.qkv, x).view(num_tokens, -1, config.head_dim)
            rope_and_write_kv(
                qkv, model.rotary, inputs.positions, inputs.slots, layer.qk_norm, eps, self._pool, index
            )
            x = linear(layer.attention_output, self._attend(index, qkv, inputs))
            x = add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = linear(layer.down, linear.gated(layer.gate_up, x))
            is_last = index + 1 == len(model.layers)
            norm = model.final_norm if is_last else model.layers[index + 1].attention_norm
            x = add_rms_norm(x, residual, norm, eps)
        return x

    def _hidden_of_one(self, inputs: GpuInputs) -> Tensor:
        """The same for one decode row: norm, gate and residual are part of the products."""
        model = self._model
        config = model.config
        eps = config.rms_norm_eps
        residual = functional.embedding(inputs.token_ids, model.embedding)
        for index, layer in enumerate(model.layers):
            qkv = fused_row(layer.qkv, residual, layer.attention_norm, eps).view(1, -1, config.head_dim)
            rope_and_write_kv(
                qkv, model.rotary, inputs.positions, inputs.slots, layer.qk_norm, eps, self._pool, index
            )
            attended = self._attend(index, qkv, inputs)
            fused_row(layer.attention_output, attended, added_to=residual)
            x = fused_row(layer.gate_up, residual, layer.mlp_norm, eps, is_gated=True)
            fused_row(layer.down, x, added_to=residual)
        return rms_norm(residual, model.final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states (rows, hidden) -> (rows, vocab)."""
        return self._model.lm_head(hidden)

    def _rotate_and_attend(self, layer: int, qkv: Tensor, inputs: GpuInputs) -> Tensor:
        qk_norm, eps = self._model.layers[layer].qk_norm, self._model.config.rms_norm_eps
        rope_and_write_kv(qkv, self._model.rotary, inputs.positions, inputs.slots, qk_norm, eps, self._pool, layer)
        return self._attend(layer, qkv, inputs)

    def _add_rotate_and_attend(self, layer: int, parts: Tensor, inputs: GpuInputs) -> Tensor:
        """The same of q, k and v in parts (num_parts, tokens, heads + 2 KV heads, head_dim), `PreloadedLayers`'."""
        qk_norm, eps = self._model.layers[layer].qk_norm, self._model.config.rms_norm_eps
        rope_and_write_kv(
            parts, self._model.rotary, inputs.positions, inputs.slots, qk_norm, eps, self._pool, layer,
            spreads_next=parts.shape[1] > FEW_ROWS,
        )  # fmt: skip
        return self._attend(layer, parts[0], inputs)

    def _attend(self, layer: int, qkv: Tensor, inputs: GpuInputs) -> Tensor:
        q = qkv[:, : self._model.config.num_heads]
        if inputs.prefill is None:
            return paged_decode(q, self._pool, layer, inputs.decode_tables, inputs.lengths, self._workspace)
        num_decode = inputs.lengths.shape[0]
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if num_decode:
            out[:num_decode] = paged_decode(
                q[:num_decode], self._pool, layer, inputs.decode_tables, inputs.lengths, self._workspace
            )
        self.attention.prefill(qkv[num_decode:], self._pool, layer, inputs.prefill, out[num_decode:])
        return out
