"""Linear layers: one class for all formats of weights, each with the GEMM that reads its format.

A model is built with plain weights; loaders replace its layers by quantized ones (`Block.linears`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

LinearLayer = Callable[[Tensor], Tensor]
"""[..., in] -> [..., out]."""


def plain(linear: Linear, x: Tensor) -> Tensor:
    return functional.linear(x, linear.weight, linear.bias)


@dataclass(slots=True, eq=False)
class Linear:
    """y = x[..., order] W^T + b, computed by the GEMM for the format of W."""

    weight: Tensor  # (out, in) in the type of x, or the format that `gemm` reads
    bias: Tensor | None = None
    names: tuple[str, ...] = ()  # the checkpoint's weights that are stacked in W
    _: KW_ONLY
    gemm: Callable[[Linear, Tensor], Tensor] = plain
    scales: Tensor | None = None  # of a quantized weight, with its offsets if they are stored together
    group_size: int = 0  # columns that share a scale; 0: all
    num_columns: int = 0  # of x; 0: as many as `weight` has
    order: Tensor | None = None  # int64 (in,), the column of x for each column of W; None: the same one
    dense: Linear | None = None  # the same layer in a form that is faster for more than `max_rows` rows
    max_rows: int = 0
    workspace: Any = None  # of a GEMM that needs one, shared by layers that run one after the other

    def __call__(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        if self.dense is not None and x.shape[0] > self.max_rows:
            return self.dense(x)
        return self.gemm(self, x)

    def gated(self, num_rows: int, is_gelu: bool) -> LinearLayer | None:
        """Return a GEMM of its own that also applies silu(gate) * up, or GELU, for such a step; None: it has none."""
        return None

    @property
    def is_plain(self) -> bool:
        """Whether `weight` is W itself, in the type of x and the order of x's columns."""
        return self.gemm is plain and self.order is None


def two_rows_at_least(linear: LinearLayer, x: Tensor) -> Tensor:
    """Compute a single row twice, because libraries sum a single row in a different order than several rows."""
    return linear(x.expand(2, -1))[:1] if x.shape[0] == 1 else linear(x)
