"""Which form a model's blocks take in a step on a GPU: chosen once per class of steps, then kept.

A step of the same class runs the same list of ops, and so the same kernels in the same order: nothing is looked up or
compared per layer. `Target` is all that the choice depends on, beside the model itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torch import Tensor

from engine.gpu.ops.form import MANY_ROWS, Form, GpuStep, Target, is_plain_alone
from engine.gpu.ops.one_row import OneRowForm
from engine.gpu.ops.plain import PlainForm
from engine.gpu.ops.split_k import SplitKForm
from engine.gpu.sampling.device_sampler import WHOLE_VOCABULARY, Vocabulary
from engine.layers.forward import AddNorm, Forward, plain_sum
from engine.models.model import Model
from engine.moe.gpu_experts import StackedExperts
from engine.moe.moe import Moe
from engine.quantization.gpu_ops import QuantizedInputForm
from engine.ranks import RankContext

MAX_TUNED_ROWS = 64  # the kernels of more rows are the same for any number of them


class GpuSeams:
    """What a rank computes with others on a GPU; this one is alone."""

    vocabulary: Vocabulary = WHOLE_VOCABULARY
    """That of its logits."""

    def forms(self, model: Model, experts: Mapping[int, StackedExperts]) -> list[Form]:
        """Forms of the model's blocks, of which a step takes the first that fits."""
        if not is_plain_alone(model):
            first: list[Form] = [QuantizedInputForm(model), SplitKForm(model)]
        else:
            first = [QuantizedInputForm(model, experts)] if QuantizedInputForm.knows(model) else []
        return [*first, OneRowForm(model, experts), PlainForm(model, experts)]

    def sum(self, model: Model) -> AddNorm[Tensor]:
        """The residual with what is pending added, without a norm: where a stage ends."""
        return sum_of_partials


SINGLE_GPU = RankContext(GpuSeams())


class GpuForwards:
    """A model's lowered forms, by class of steps."""

    def __init__(self, model: Model, ranks: RankContext[GpuSeams] = SINGLE_GPU) -> None:
        experts = {id(block): StackedExperts.of(block) for block in model.blocks if isinstance(block, Moe)}
        self._forms = ranks.seams.forms(model, experts)
        self._end = ranks.seams.sum(model) if ranks.passes_on else None
        first, self._max_quantized_rows = self._forms[0], 0
        if isinstance(first, QuantizedInputForm) and not is_plain_alone(model):
            self._max_quantized_rows = first.max_rows
        self._lowered = cache(self._lower)

    def choose(self, num_tokens: int, is_decode: bool) -> Forward[GpuStep]:
        """is_decode: no chunks of prompts."""
        if num_tokens <= self._max_quantized_rows:  # whose kernels choose by themselves
            num_tokens = self._max_quantized_rows
        elif num_tokens > MAX_TUNED_ROWS:
            num_tokens = MANY_ROWS
        return self._lowered(Target(num_tokens, is_decode))

    def _lower(self, target: Target) -> Forward[GpuStep]:
        lowered = next(form for form in self._forms if form.takes(target)).lower(target)
        return lowered if self._end is None else lowered.ended_by(self._end)


def sum_of_partials(residual: Tensor, pending: Tensor | None) -> Tensor:
    """What is pending is plain, or partial sums."""
    if pending is not None and pending.dim() == 3:
        pending = pending.sum(0)
    return plain_sum(residual, pending)
