"""Which form a model's blocks take in a step on a GPU: chosen once per class of steps, then kept.

A step of the same class runs the same list of ops, and so the same kernels in the same order: nothing is looked up or
compared per layer. `Target` is all that the choice depends on, beside the model itself.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.gpu.ops.one_row import OneRowOps
from engine.gpu.ops.plain import PlainOps
from engine.gpu.ops.quantized_input import QuantizedInputOps
from engine.gpu.ops.split_k import SplitKOps
from engine.gpu.ops.target import MANY_ROWS, GpuStep, Target
from engine.layers.forward import Forward
from engine.models.model import Model
from kernels.gpu.small_m_gemm import SmallMWorkspace

MAX_TUNED_ROWS = 64  # the kernels of more rows are the same for any number of them


class Form(Protocol):
    """One form of all blocks of a model, over its weights."""

    def takes(self, target: Target) -> bool:
        """Whether it is the form of such steps, if none before it is."""
        ...

    def lower(self, target: Target) -> Forward[GpuStep]: ...


class GpuForwards:
    """A model's lowered forms, by class of steps."""

    def __init__(self, model: Model, device: torch.device) -> None:
        quantized = QuantizedInputOps(model)
        self._max_quantized_rows = quantized.max_rows
        self._forms: tuple[Form, ...] = (
            quantized, SplitKOps(model), OneRowOps(model), PlainOps(model, SmallMWorkspace(device)),
        )  # fmt: skip
        self._by_target: dict[Target, Forward[GpuStep]] = {}

    def choose(self, num_tokens: int, is_decode: bool) -> Forward[GpuStep]:
        """is_decode: no chunks of prompts."""
        target = self._target(num_tokens, is_decode)
        forward = self._by_target.get(target)
        if forward is None:
            form = next(form for form in self._forms if form.takes(target))
            forward = self._by_target[target] = form.lower(target)
        return forward

    def _target(self, num_tokens: int, is_decode: bool) -> Target:
        if num_tokens <= self._max_quantized_rows:  # whose kernels choose by themselves
            return Target(self._max_quantized_rows, is_decode)
        return Target(num_tokens if num_tokens <= MAX_TUNED_ROWS else MANY_ROWS, is_decode)
