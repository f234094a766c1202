"""A block whose output is normed before it is added to the residual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from torch import Tensor

from engine.layers.block import Block, LinearRef, Step
from kernels.elementwise import rms_norm


class PostNormed(Block):
    """y = norm(inner(x))."""

    gpu_ops = "engine.post_norms.gpu_ops"

    def __init__(self, inner: Block, post_norm: Tensor) -> None:
        self._inner = inner
        self.norm, self.eps = inner.norm, inner.eps
        self.post_norm = post_norm

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return self.normed(self.inner(x, step)).to(x.dtype)

    @property
    def inner(self) -> Block:
        return self._inner

    def normed(self, y: Tensor) -> Tensor:
        """y: the inner block's output, of all ranks."""
        return rms_norm(y, self.post_norm, self.eps)

    def linears(self) -> Iterator[LinearRef]:
        return self.inner.linears()

    def copy(self) -> Self:
        block = super().copy()
        block._inner = self._inner.copy()
        return block
