"""Blocks of one rank among several: outputs are summed over ranks when they are added to the residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.gpu.ops.rules import Fold, GpuForward, GpuOp, GpuSeams, GpuStep, Pending
from engine.layers.forward import Forward, Stream
from engine.models.model import Model
from engine.post_norms.gpu_ops import Unnormed
from engine.tensor_parallel.gpu_group import DeviceGroup, VocabShards
from kernels.gpu.collectives.vocab_parallel_embed import vocab_parallel_embed
from kernels.gpu.elementwise.rms_norm import add_rms_norm

ITS_SHARE = "the stream starts with a pending output, and each is a rank's share of a sum"


class ShardSeams(GpuSeams):
    """Seams of one rank among several, with a shard of every layer."""

    is_alone = False

    def __init__(self, group: DeviceGroup, vocab_size: int) -> None:
        """vocab_size: of the whole model."""
        self.group = group
        self.vocabulary = VocabShards(group, vocab_size)

    @property
    def add_norm_quantize(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return self.group.all_reduce_rms_norm_quantize

    def forward(self, model: Model, ops: Sequence[GpuOp]) -> GpuForward:
        final = self.fold(model.final_norm, model.config.rms_norm_eps)
        return Forward(self.start(model), ops, final, model.head)

    def start(self, model: Model) -> Callable[[GpuStep], Stream[Pending]]:
        """Start with this rank's rows of the embedding, as a pending output."""
        embedding = model.embedding
        first_id = self.group.rank * embedding.shape[0]

        def start(step: GpuStep) -> Stream[Pending]:
            residual, pending = vocab_parallel_embed(step.token_ids, embedding, first_id)
            return Stream(residual, model.embedded(pending, step.token_ids, first_id))

        return start

    def fold(self, weight: Tensor, eps: float) -> Fold[Tensor]:
        """See GpuSeams. An output that is normed before it is added is summed with a residual of zeros."""
        add_norm = self.group.all_reduce_rms_norm

        def fold(residual: Tensor, pending: Pending | None) -> Tensor:
            if isinstance(pending, Unnormed):
                y = add_norm(pending.values, torch.zeros_like(residual), pending.weight, eps)
                return add_rms_norm(y, residual, weight, eps)
            assert isinstance(pending, Tensor), ITS_SHARE
            return add_norm(pending, residual, weight, eps)

        return fold

    def sum(self, model: Model) -> Fold[Tensor]:
        """See GpuSeams. The kernel that sums over ranks also writes a norm, which is dropped."""
        add_norm = self.fold(model.blocks[0].norm, model.config.rms_norm_eps)  # any norm of this width

        def fold(residual: Tensor, pending: Pending | None) -> Tensor:
            add_norm(residual, pending)
            return residual

        return fold
