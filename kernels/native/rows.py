"""Norm, rotation and gate of rows in C (`rows.c`), if gcc has compiled it and the dtypes are supported."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.native.library import DTYPES, library


def add_rms_norm(weight: Tensor, eps: float, dtype: torch.dtype) -> Callable[[Tensor, Tensor | None], Tensor] | None:
    """Make the function that adds x (rows, n), if given, to a float32 residual (rows, n) in place, and norms the sum.

    weight: (n,). Its result has `dtype`. None if it is not supported.
    """
    found = library()
    if found is None or dtype not in DTYPES or weight.device.type != "cpu":
        return None
    function, wide, is_float32 = found.native_add_rms_norm, weight.float().contiguous(), dtype == torch.float32

    def add_norm(residual: Tensor, x: Tensor | None) -> Tensor:
        assert residual.is_contiguous(), "it is read and written as it lies"
        assert residual.dtype == torch.float32
        rows, n = residual.shape
        out = torch.empty(rows, n, dtype=dtype)
        x_at, x_is_float32 = None, False
        if x is not None:
            x = x.contiguous() if x.dtype in DTYPES else x.float().contiguous()
            x_at, x_is_float32 = x.data_ptr(), x.dtype == torch.float32
        function(residual.data_ptr(), x_at, x_is_float32, wide.data_ptr(), eps, rows, n, out.data_ptr(), is_float32)
        return out

    return add_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Rotate like `kernels.elementwise.rotate_`; returns False, without doing anything, if it is not supported."""
    is_known = x.device.type == "cpu" and x.dtype in DTYPES and x.stride(-1) == 1 and cos.dtype == torch.float32
    if not is_known or cos.stride(-1) != 1 or sin.stride(-1) != 1 or (found := library()) is None:
        return False
    tokens, heads, dim = x.shape
    found.native_rotate(
        x.data_ptr(), x.dtype == torch.float32, tokens, heads, dim, x.stride(0), x.stride(1),
        cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0),
    )  # fmt: skip
    return True


def silu_mul(gate_up: Tensor, alpha: float = 1.0, limit: float = 0.0) -> Tensor | None:
    """`kernels.elementwise.silu_mul`; None where that is not possible."""
    if gate_up.device.type != "cpu" or gate_up.dtype not in DTYPES or not gate_up.is_contiguous():
        return None
    if gate_up.dim() != 2 or (found := library()) is None:
        return None
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype)
    found.native_silu_mul(gate_up.data_ptr(), out.data_ptr(), gate_up.dtype == torch.float32, rows, n, alpha, limit)
    return out
