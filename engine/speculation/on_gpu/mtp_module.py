"""A module for multi-token prediction on a GPU. See `engine/speculation/mtp/module.py` for what it computes.

Its decoder layer uses the ops and the attention of the model's own layers, over a pool of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from engine.gpu.attention.backend import GpuInputs, GroupInputs
from engine.gpu.forward import attention_of
from engine.gpu.lowering import MAX_TUNED_ROWS, RULES
from engine.gpu.ops import plain
from engine.gpu.ops.rules import MANY_ROWS, SINGLE_GPU, AddNorm, GpuOp, GpuStep, Target, fitting, ops_of
from engine.layers.forward import Forward, Stream
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.speculation.mtp.module import MtpModule
from engine.speculation.on_gpu.head import GpuHead, HeadSize
from kernels.gpu.elementwise.rms_norm import rms_norm


class GpuMtpModule(GpuHead):
    """See GpuHead."""

    def __init__(self, module: MtpModule, config: ModelConfig, size: HeadSize) -> None:
        """config: the model's. Converts the module's weights in place to the layout that ops read."""
        held = self._weights = module.weights
        self._eps, device, dtype = config.rms_norm_eps, held.norm.device, held.norm.dtype
        kv = config.num_kv_planes, config.num_kv_heads, config.head_dim
        super().__init__(module.layers, size, kv, config.hidden_size, dtype, device)
        for block in held.blocks:
            if block.inner.gpu_ops:
                ops_of(block.inner).prepare(block.inner)
        module.attention.layer = 0
        model = Model(
            replace(config, num_layers=1), held.embedding, list(held.blocks), held.norm, held.head, held.rotary, dtype
        )
        no_prompts = 0
        self._attention = attention_of(model)(model, self._pool, size.max_rows, "triton", dtype, no_prompts)
        self._splits = plain.workspace_on(device)
        self._ops = cache(self._lowered)
        self._no_tiles = torch.zeros(0, 4, dtype=torch.int32, device=device)

    def _lowered(self, num_rows: int) -> Sequence[GpuOp]:
        """Lower for any number of rows, with the GEMMs for `num_rows`: ops of one row have another residual."""
        target = Target(num_rows, True, SINGLE_GPU.seams, self._splits)
        return [fitting(block, RULES, target)[-1].op(block, target) for block in self._weights.blocks]

    def _joined(self, read: Tensor) -> Tensor:
        return rms_norm(read[0].contiguous(), self._weights.model_norm, self._eps)

    def _inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        held, eps = self._weights, self._eps
        embedded = functional.embedding(token_ids, held.embedding)
        normed = rms_norm(embedded, held.embedding_norm, eps), rms_norm(hidden, held.hidden_norm, eps)
        return held.joint(torch.cat(normed, dim=-1))

    def _keep(self, x: Tensor, positions: Tensor, slots: Tensor) -> None:
        no_rows = slots[:0]
        no_tables = no_rows.view(0, 1)
        plan = self._attention.graph_plan(no_tables, self._no_tiles)
        inputs = GpuInputs(slots, positions, no_rows, [GroupInputs(slots, no_tables, plan)])

        def attend(*queries: object) -> Tensor:
            return self._attention.attend(inputs, *queries)[:1]  # the result is not used

        fold, body = self._ops(MANY_ROWS)[0]
        body(fold(x, None), GpuStep(slots, slots, attend))

    def _pass(
        self, x: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        held = self._weights
        # Clamped to the table: drafts beyond the model's last position are never accepted.
        positions = positions.clamp(max=held.rotary.shape[0] - 1)
        inputs = GpuInputs(slots, positions, lengths, [GroupInputs(slots, tables)])
        self._attention.plan_decode(inputs)
        ops = self._ops(x.shape[0] if x.shape[0] <= MAX_TUNED_ROWS else MANY_ROWS)
        form = Forward(lambda _: Stream(x), ops, AddNorm(held.norm, self._eps), held.head)
        outputs = form.hidden(GpuStep(slots, slots, partial(self._attention.attend, inputs)))
        return outputs, form.logits(outputs)
