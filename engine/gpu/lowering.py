"""Which form a model's blocks take in a step on a GPU: chosen once per class of steps, then kept.

A step of the same class runs the same list of ops, and so the same kernels in the same order: nothing is looked up or
compared per layer. `Target` is all that the choice depends on, beside the model itself.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from engine.expert_parallel.gpu_divided_rows import DividedRowsForm
from engine.gpu.ops.form import MANY_ROWS, Form, GpuStep, Target, is_plain_alone
from engine.gpu.ops.one_row import OneRowForm
from engine.gpu.ops.plain import PlainForm
from engine.gpu.ops.split_k import SplitKForm
from engine.layers.forward import AddNorm, Forward, plain_sum
from engine.models.model import Model
from engine.moe.gpu_experts import StackedExperts
from engine.moe.moe import Moe
from engine.quantization.gpu_ops import QuantizedInputForm
from engine.tensor_parallel.gpu_group import DeviceGroup
from engine.tensor_parallel.gpu_ops import QuantizedTensorParallelForm, TensorParallelForm

MAX_TUNED_ROWS = 64  # the kernels of more rows are the same for any number of them


class GpuForwards:
    """A model's lowered forms, by class of steps."""

    def __init__(self, model: Model, group: DeviceGroup | None = None, passes_on: bool = False) -> None:
        """group: of the ranks that have the other shards of the model. passes_on: hidden states, to another stage."""
        self._passes_on = passes_on
        self._sum = sum_of_partials if group is None else sum_over_ranks(model, group)
        self._lowered = cache(self._lower)
        experts = {id(block): StackedExperts.of(block) for block in model.blocks if isinstance(block, Moe)}
        if is_plain_alone(model):
            self._max_quantized_rows = 0
            self._forms: list[Form] = [OneRowForm(model, experts), PlainForm(model, experts)]
            if group is not None:
                of_ranks = TensorParallelForm if group.rows is None else DividedRowsForm
                self._forms = [of_ranks(model, group, experts)]
            elif QuantizedInputForm.knows(model):
                self._forms.insert(0, QuantizedInputForm(model, experts))
            return
        if group is not None:
            quantized: QuantizedInputForm = QuantizedTensorParallelForm(model, group)
            others: list[Form] = [TensorParallelForm(model, group, experts)]
        else:
            quantized = QuantizedInputForm(model)
            others = [SplitKForm(model), OneRowForm(model, experts), PlainForm(model, experts)]
        self._max_quantized_rows = quantized.max_rows
        self._forms = [quantized, *others]

    def choose(self, num_tokens: int, is_decode: bool) -> Forward[GpuStep]:
        """is_decode: no chunks of prompts."""
        if num_tokens <= self._max_quantized_rows:  # whose kernels choose by themselves
            num_tokens = self._max_quantized_rows
        elif num_tokens > MAX_TUNED_ROWS:
            num_tokens = MANY_ROWS
        return self._lowered(Target(num_tokens, is_decode))

    def _lower(self, target: Target) -> Forward[GpuStep]:
        lowered = next(form for form in self._forms if form.takes(target)).lower(target)
        return lowered.ended_by(self._sum) if self._passes_on else lowered


def sum_of_partials(residual: Tensor, pending: Tensor | None) -> Tensor:
    """The residual with what is pending added, plain or in partial sums, without a norm."""
    if pending is not None and pending.dim() == 3:
        pending = pending.sum(0)
    return plain_sum(residual, pending)


def sum_over_ranks(model: Model, group: DeviceGroup) -> AddNorm[Tensor]:
    """The residual with all ranks' outputs added. The kernel that sums writes its norm, too, which is dropped."""
    norm, eps = model.blocks[0].norm, model.config.rms_norm_eps  # any has the width

    def fold(residual: Tensor, pending: Tensor | None) -> Tensor:
        assert pending is not None, "the stream starts with a pending output"
        group.all_reduce_rms_norm(pending, residual, norm, eps)
        return residual

    return fold
