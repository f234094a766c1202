"""Blocks of one rank among several: the plain form, with outputs summed over ranks where they meet the residual."""

from __future__ import annotations

from torch import Tensor

from engine.gpu.group import DeviceGroup
from engine.gpu.ops.form import GpuStep, Target
from engine.gpu.ops.plain import PlainForm
from engine.layers.forward import AddNorm, Forward, Op, Stream
from engine.models.model import Model
from kernels.gpu.vocab_parallel_embed import vocab_parallel_embed


class TensorParallelForm(PlainForm):
    """Takes every step. The model has this rank's shard of all weights."""

    def __init__(self, model: Model, group: DeviceGroup) -> None:
        super().__init__(model)
        self._group = group

    def lower(self, target: Target) -> Forward[GpuStep]:
        model = self.model
        pairs = zip(model.blocks, self.bodies(target.num_rows), strict=True)
        ops = [Op(self._fold(block.norm, block.eps), body) for block, body in pairs]
        return Forward(self._start, ops, self._fold(model.final_norm, model.config.rms_norm_eps), model.head)

    def _start(self, step: GpuStep) -> Stream:
        embedding = self.model.embedding
        return Stream(*vocab_parallel_embed(step.token_ids, embedding, self._group.rank * embedding.shape[0]))

    def _fold(self, weight: Tensor, eps: float) -> AddNorm[Tensor]:
        group = self._group

        def fold(residual: Tensor, pending: Tensor | None) -> Tensor:
            assert pending is not None, "the stream starts with a pending output"
            return group.all_reduce_rms_norm(pending, residual, weight, eps)

        return fold
