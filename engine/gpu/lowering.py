"""Which form a model's blocks take in a step on a GPU: chosen once per class of steps, then kept.

A step of the same class runs the same list of ops, and so the same kernels in the same order: nothing is looked up or
compared per layer. `Target` is all that the choice depends on, beside the model itself.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from engine.gpu.group import DeviceGroup
from engine.gpu.ops.experts import stacked_experts
from engine.gpu.ops.form import MANY_ROWS, Form, GpuStep, Target, is_plain_alone
from engine.gpu.ops.one_row import OneRowForm
from engine.gpu.ops.plain import PlainForm
from engine.gpu.ops.quantized_input import QuantizedInputForm
from engine.gpu.ops.split_k import SplitKForm
from engine.gpu.ops.tensor_parallel import QuantizedTensorParallelForm, TensorParallelForm
from engine.layers.forward import Forward, plain_sum
from engine.layers.moe import Moe
from engine.models.model import Model

MAX_TUNED_ROWS = 64  # the kernels of more rows are the same for any number of them


class GpuForwards:
    """A model's lowered forms, by class of steps."""

    def __init__(self, model: Model, group: DeviceGroup | None = None, passes_on: bool = False) -> None:
        """group: of the ranks that have the other shards of the model. passes_on: hidden states, to another stage."""
        self._passes_on = passes_on
        self._lowered = cache(self._lower)
        experts = self.experts = {
            id(block): stacked_experts(block) for block in model.blocks if isinstance(block, Moe)
        }
        if is_plain_alone(model):
            self._max_quantized_rows = 0
            self._forms: list[Form] = [OneRowForm(model, experts), PlainForm(model, experts)]
            if group is not None:
                self._forms = [TensorParallelForm(model, group, experts)]
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
        return lowered.ended_by(sum_of_partials) if self._passes_on else lowered


def sum_of_partials(residual: Tensor, pending: Tensor | None) -> Tensor:
    """The residual with what is pending added, plain or in partial sums, without a norm."""
    if pending is not None and pending.dim() == 3:
        pending = pending.sum(0)
    return plain_sum(residual, pending)
