"""A linear layer whose weight holds the columns of x in another order, as act-order quantization leaves them."""

from __future__ import annotations

from torch import Tensor

from engine.layers.linear import LinearLayer


class Reordered:
    """y = inner(x[..., order])."""

    __slots__ = ("inner", "order")

    def __init__(self, inner: LinearLayer, order: Tensor) -> None:
        self.inner = inner
        self.order = order  # (in,) int64

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x.index_select(-1, self.order))
