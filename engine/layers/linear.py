"""Linear layers: one class for all formats of weights, each with the GEMM that reads its format.

A model is built with plain weights; loaders replace its layers by quantized ones (`Block.linears`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

LinearLayer = Callable[[Tensor], Tensor]
"""[..., in] -> [..., out]."""


def plain(linear: Linear, x: Tensor) -> Tensor:
    return functional.linear(x, linear.weight, linear.bias)


class Linear:
    """y = x[..., order] W^T + b, computed by the GEMM for the format of W.

    weight: (out, in) in the type of x, or the format that `gemm` reads. scales: of a quantized weight, with its
    offsets if they are stored together. group_size: columns that share a scale; 0: all. names: the checkpoint's
    weights that are stacked in W. order: (in,) int64, the column of x that each column of W is multiplied by; None:
    the same one. dense: the same layer in a form that is faster for more than `max_rows` rows, or None. workspace:
    of a GEMM that needs one, shared by layers that run one after the other.
    """

    __slots__ = (
        "bias", "dense", "gemm", "group_size", "max_rows", "names", "num_columns", "order", "scales", "weight",
        "workspace",
    )  # fmt: skip

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, names: tuple[str, ...] = (), *,
        gemm: Callable[[Linear, Tensor], Tensor] = plain, scales: Tensor | None = None, group_size: int = 0,
        num_columns: int = 0, dense: Linear | None = None, max_rows: int = 0, workspace: Any = None,
    ) -> None:  # fmt: skip
        """num_columns: of x; 0: as many as `weight` has."""
        self.weight, self.bias, self.names = weight, bias, names
        self.gemm, self.scales, self.group_size = gemm, scales, group_size
        self.num_columns = num_columns
        self.order: Tensor | None = None
        self.dense, self.max_rows, self.workspace = dense, max_rows, workspace

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

    def changed(self, **attributes: Any) -> Linear:
        """Return a copy of the layer with other values of these attributes. Weights are shared."""
        linear = copy.copy(self)
        for name, value in attributes.items():
            setattr(linear, name, value)
        return linear


def two_rows_at_least(linear: LinearLayer, x: Tensor) -> Tensor:
    """Compute a single row twice, because libraries sum a single row in a different order than several rows."""
    return linear(x.expand(2, -1))[:1] if x.shape[0] == 1 else linear(x)
