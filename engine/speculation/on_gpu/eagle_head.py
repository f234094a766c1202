"""An EAGLE-3 head on a GPU. See `engine/speculation/eagle/head.py` for what the layer computes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.rotary import rotary_table
from engine.speculation.eagle.head import HeadShape, HeadWeights
from engine.speculation.on_gpu.head import GpuHead, HeadSize
from kernels.gpu.attention.decode_plan import plan_decode
from kernels.gpu.attention.kv_splits import DecodeWorkspace
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.elementwise.rms_norm import add_rms_norm, rms_norm
from kernels.gpu.elementwise.rope import rope_and_write_kv
from kernels.gpu.elementwise.silu_mul import silu_mul


class GpuEagleHead(GpuHead):
    """See GpuHead."""

    def __init__(self, shape: HeadShape, weights: HeadWeights, size: HeadSize, vocab_size: int) -> None:
        """vocab_size: the model's."""
        self._shape, self._weights, self._vocab_size = shape, weights, vocab_size
        device, dtype = weights.norm.device, weights.norm.dtype
        kv = 2, shape.num_kv_heads, shape.head_dim
        super().__init__(sorted(set(shape.layers)), size, kv, shape.hidden_size, dtype, device)
        self._order = [self.layers.index(layer) for layer in shape.layers]
        num_positions = size.max_model_len + size.block_size
        table_dtype = torch.float32 if device.type == "cpu" else dtype
        self._rotary = rotary_table(shape.rope, shape.head_dim, num_positions, table_dtype, device)
        self._workspace = DecodeWorkspace(size.max_rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, device)

    def _joined(self, read: Tensor) -> Tensor:
        return self._weights.fc(torch.cat([read[index] for index in self._order], dim=-1))

    def _inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        held, eps = self._weights, self._shape.eps
        embedded = functional.embedding(token_ids, held.embedding)
        return torch.cat([rms_norm(embedded, held.input_norm, eps), rms_norm(hidden, held.hidden_norm, eps)], dim=-1)

    def _keep(self, x: Tensor, positions: Tensor, slots: Tensor) -> None:
        self._store(self._weights.kv(x).view(x.shape[0], -1, self._shape.head_dim), positions, slots)

    def _pass(
        self, x: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        held, shape = self._weights, self._shape
        plan = plan_decode(lengths, shape.num_heads, self._pool)
        qkv = torch.cat([held.q(x), held.kv(x)], dim=-1).view(x.shape[0], -1, shape.head_dim)
        self._store(qkv, positions, slots)
        attended = paged_decode(qkv[:, : shape.num_heads], self._pool, 0, tables, lengths, plan, self._workspace)
        residual = x[:, shape.hidden_size :].contiguous() if shape.norms_residual else hidden.clone()
        normed = add_rms_norm(held.output(attended), residual, held.mlp_norm, shape.eps)
        final = add_rms_norm(held.down(silu_mul(held.gate_up(normed))), residual, held.norm, shape.eps)
        return residual, self._whole(held.head(final))

    def _store(self, heads: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Rotate q, if present, and K in place; store K and V."""
        rope_and_write_kv(heads, self._rotary, positions, slots, None, 0.0, self._pool, 0)

    def _whole(self, logits: Tensor) -> Tensor:
        """Scatter logits to the model's vocabulary, since noise belongs to its token ids."""
        own_ids = self._weights.token_ids
        if own_ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self._vocab_size), float("-inf"))
        whole[:, own_ids] = logits
        return whole
