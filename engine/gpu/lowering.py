"""Which op stands for each block in a step on a GPU: by the first rule that fits, once per class of steps, then kept.

A step of the same class runs the same list of ops, and so the same kernels in the same order: nothing is looked up or
compared per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from engine.gpu.ops import one_row, plain, split_k
from engine.gpu.ops.pending import AddNorm, Fold, Partials, Pending, Unnormed, plain_of
from engine.gpu.ops.rules import MANY_ROWS, GpuOp, GpuStep, Rule, Target, fitting
from engine.gpu.sampling.device_sampler import WHOLE_VOCABULARY, Vocabulary
from engine.layers.forward import Forward, Stream, plain_sum
from engine.models.model import Model
from engine.quantization import gpu_ops as quantized
from engine.quantization.gpu_linears import QuantizedInput
from engine.ranks import RankContext
from kernels.gpu.elementwise.rms_norm import embed_rms_norm
from kernels.gpu.gemm.split_k import SplitKWorkspace
from kernels.gpu.quantization.quantize import add_rms_norm_quantize

MAX_TUNED_ROWS = 64  # the kernels of more rows are the same for any number of them
RULES = (*quantized.RULES, *split_k.RULES, *one_row.RULES, *plain.RULES)
GpuForward = Forward[GpuStep, Pending]


class GpuSeams:
    """What a rank computes with others on a GPU; this one is alone."""

    is_alone = True
    vocabulary: Vocabulary = WHOLE_VOCABULARY
    """That of its logits."""
    rules: Sequence[Rule] = ()
    """Before all others."""

    def forward(self, model: Model, ops: Sequence[GpuOp]) -> GpuForward:
        """The ops between embedding and head."""
        final, (norm, first) = self.fold(model.final_norm, model.config.rms_norm_eps), ops[0]
        if model.embedding_scale is not None or not isinstance(norm, AddNorm):
            return Forward(lambda step: Stream(model.embed(step.token_ids)), ops, final, model.head)

        def start(step: GpuStep) -> Stream[Pending]:
            """The first norm and the embedding's rows are one kernel."""
            residual, x = embed_rms_norm(step.token_ids, model.embedding, norm.weight, norm.eps)
            return Stream(residual, first(x, step))

        return Forward(start, ops[1:], final, model.head)

    def fold(self, weight: Tensor, eps: float) -> Fold[Tensor]:
        """The RMS norm of the residual, with all that is pending."""
        return AddNorm(weight, eps)

    def quantizing_fold(
        self, weight: Tensor, eps: float, dtype: torch.dtype, num_planes: int
    ) -> Fold[QuantizedInput]:
        """What `fold` gives, quantized in the same kernel, see `kernels.gpu.quantization.quantize`."""

        def fold(residual: Tensor, pending: Pending | None) -> QuantizedInput:
            if isinstance(pending, Partials):
                pending = pending.values
            elif isinstance(pending, Unnormed):
                pending = plain_of(pending, eps)
            return add_rms_norm_quantize(pending, residual, weight, eps, dtype, num_planes)

        return fold

    def sum(self, model: Model) -> Fold[Tensor]:
        """The residual with what is pending added, without a norm: where a stage ends."""
        return lambda residual, pending: plain_sum(residual, plain_of(pending, model.config.rms_norm_eps))


SINGLE_GPU = RankContext(GpuSeams())


class GpuForwards:
    """A model's lowered forms, by class of steps."""

    def __init__(self, model: Model, ranks: RankContext[GpuSeams] = SINGLE_GPU) -> None:
        self._model, self._ranks = model, ranks
        self._workspace = SplitKWorkspace(model.embedding.device)
        self._max_quantized_rows = quantized.max_quantized_rows(model)
        self._lowered = cache(self._lower)
        self._lowered(MANY_ROWS, False)  # experts are stacked before memory is measured

    def choose(self, num_tokens: int, is_decode: bool) -> GpuForward:
        """is_decode: no chunks of prompts."""
        if num_tokens > MAX_TUNED_ROWS:
            num_tokens = self._max_quantized_rows if num_tokens <= self._max_quantized_rows else MANY_ROWS
        return self._lowered(num_tokens, is_decode)

    def _lower(self, num_rows: int, is_decode: bool) -> GpuForward:
        seams, blocks = self._ranks.seams, self._model.blocks
        target = Target(num_rows, is_decode, seams, self._workspace)
        rules = [fitting(block, (*seams.rules, *RULES), target) for block in blocks]
        ways = set.intersection(*({rule.way for rule in each} for each in rules))
        ops = [
            next(rule for rule in each if rule.way in ways).op(block, target)
            for block, each in zip(blocks, rules, strict=True)
        ]
        forward = seams.forward(self._model, ops)
        return forward.ended_by(seams.sum(self._model)) if self._ranks.passes_on else forward
