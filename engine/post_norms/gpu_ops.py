"""Blocks whose output is normed, on a GPU: the inner op of any number of rows, and a fold that norms and adds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.gpu.ops import plain
from engine.gpu.ops.rules import GpuOp, GpuStep, PendingOutput, Rule, Target, fitting, plain_of
from engine.layers.forward import Op
from engine.post_norms.post_norm import PostNormed
from kernels.gpu.elementwise.rms_norm import rms_norm
from kernels.gpu.post_norms.post_norm import post_norm_add_norm


@dataclass(frozen=True, slots=True)
class Unnormed(PendingOutput):
    """An output (num_tokens, hidden) whose RMS norm, with `weight`, is added."""

    values: Tensor
    weight: Tensor

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return post_norm_add_norm(self.values, self.weight, residual, weight, eps)

    def plain(self, eps: float) -> Tensor:
        return rms_norm(self.values, self.weight, eps)

    def rows(self, index: Tensor) -> Unnormed:
        return Unnormed(self.values[index], self.weight)


def prepare(block: PostNormed) -> None:
    """The inner block prepares its own weights."""


def post_normed(block: PostNormed, target: Target) -> GpuOp:
    inner = fitting(block.inner, plain.RULES, target)[-1].op(block.inner, target)

    def body(x: Tensor, step: GpuStep) -> Unnormed:
        values = plain_of(inner.body(x, step), block.eps)
        assert values is not None, "only ops of one row add their outputs themselves"
        return Unnormed(values, block.post_norm)

    return Op(inner.fold, body)


RULES = (Rule(PostNormed, post_normed),)
