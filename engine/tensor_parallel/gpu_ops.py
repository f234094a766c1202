"""Blocks of one rank among several: outputs are summed over ranks where they meet the residual."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.gpu.ops.form import GpuStep, Target, post_norms
from engine.gpu.ops.plain import PlainForm
from engine.layers.block import Block
from engine.layers.forward import AddNorm, Forward, Op, Stream
from engine.models.model import Model
from engine.moe.gpu_experts import StackedExperts
from engine.quantization.gpu_linears import EightBit, QuantizedInput
from engine.quantization.gpu_ops import QuantizedInputForm
from engine.tensor_parallel.gpu_group import DeviceGroup
from kernels.gpu.collectives.vocab_parallel_embed import vocab_parallel_embed
from kernels.gpu.elementwise.rms_norm import add_rms_norm


class TensorParallelForm(PlainForm):
    """Takes every step. The model has this rank's shard of all weights."""

    sums_experts = True

    def __init__(self, model: Model, group: DeviceGroup, experts: Mapping[int, StackedExperts]) -> None:
        super().__init__(model, experts)
        self._group = group

    def lower(self, target: Target) -> Forward[GpuStep]:
        model, group = self.model, self._group
        *posts, last = post_norms(model)
        triples = zip(model.blocks, posts, self.bodies(target.num_rows), strict=True)
        ops = [Op(all_reduce_norm(group, block.norm, block.eps, post), body) for block, post, body in triples]
        final = all_reduce_norm(group, model.final_norm, model.config.rms_norm_eps, last)
        return Forward(embed_part(model, group), ops, final, model.head)


class QuantizedTensorParallelForm(QuantizedInputForm):
    """Takes models of quantized inputs: the kernel that sums over ranks and norms quantizes them, too."""

    def __init__(self, model: Model, group: DeviceGroup) -> None:
        super().__init__(model)
        self._group = group

    def start(self) -> Callable[[GpuStep], Stream]:
        return embed_part(self.model, self._group)

    def final_norm(self) -> AddNorm[Tensor]:
        return all_reduce_norm(self._group, self.model.final_norm, self.model.config.rms_norm_eps)

    def add_norm_quantize(self, block: Block, reader: EightBit) -> AddNorm[QuantizedInput]:
        group = self._group

        def fold(residual: Tensor, pending: Tensor | None) -> QuantizedInput:
            assert pending is not None, "the stream starts with a pending output"
            return group.all_reduce_rms_norm_quantize(
                pending, residual, block.norm, block.eps, reader.dtype, reader.num_planes
            )

        return fold


def embed_part(model: Model, group: DeviceGroup) -> Callable[[GpuStep], Stream]:
    """Start with the rank's part of the embedding's rows, pending."""
    embedding, scale, first_id = model.embedding, model.embedding_scale, group.rank * model.embedding.shape[0]

    def start(step: GpuStep) -> Stream:
        residual, pending = vocab_parallel_embed(step.token_ids, embedding, first_id)
        return Stream(residual, pending if scale is None else pending * scale)

    return start


def all_reduce_norm(
    group: DeviceGroup, weight: Tensor, eps: float, post_norm: Tensor | None = None
) -> AddNorm[Tensor]:
    """post_norm: of what is pending, when it is summed and before it is added: by itself, a sum with zeros."""

    def fold(residual: Tensor, pending: Tensor | None) -> Tensor:
        assert pending is not None, "the stream starts with a pending output"
        if post_norm is None:
            return group.all_reduce_rms_norm(pending, residual, weight, eps)
        y = group.all_reduce_rms_norm(pending, torch.zeros_like(residual), post_norm, eps)
        return add_rms_norm(y, residual, weight, eps)

    return fold
