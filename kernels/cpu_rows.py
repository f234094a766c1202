"""Norm, rotation and gate of rows on a CPU in compiled C (`kernels/native/rows.py`), where that is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

_SPEC = find_spec("kernels.native")
if _SPEC is not None and _SPEC.has_location:  # a folder without code has none
    from kernels.native.rows import add_rms_norm, rotate, silu_mul
else:

    def add_rms_norm(
        weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor | None], Tensor] | None:
        return None

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
        return False

    def silu_mul(gate_up: Tensor, alpha: float, limit: float) -> Tensor | None:
        return None


__all__ = ["add_rms_norm", "rotate", "silu_mul"]
