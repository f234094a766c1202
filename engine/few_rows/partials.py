"""An output that a GEMM leaves as split-K partials, which are summed where it is added to the residual."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.gpu.ops.rules import PendingOutput
from kernels.gpu.few_rows.partials import add_rms_norm_of_partials


@dataclass(frozen=True, slots=True)
class Partials(PendingOutput):
    """An output as split-K partials (num_parts, num_tokens, hidden)."""

    values: Tensor

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm_of_partials(self.values, residual, weight, eps)

    def plain(self, eps: float) -> Tensor:
        return self.values.sum(0)

    def rows(self, index: Tensor) -> Partials:
        return Partials(self.values[:, index])
