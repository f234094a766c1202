"""Kernels with a program per row, computed by torch at once: interpreted, they took a third of the time.

tests/kernels interprets the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from kernels.quantization.w4a16_gemm import dequantize_w4


class Launched:
    """Replaces a kernel: takes its grid and arguments."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self._compute = compute

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compute


def _normed(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = rows.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, n: int, stride: int, eps: float, **options: Any
) -> None:
    rows = x.as_strided((out.numel() // n, n), (stride, 1))
    if options["HAS_RESIDUAL"]:
        assert residual is not None
        residual.view(-1, n).copy_(rows.float() + residual.view(-1, n).float())
        rows = residual.view(-1, n)
    out.view(-1, n).copy_(_normed(rows, weight, eps))


def _embed_norm(
    ids: Tensor, embedding: Tensor, weight: Tensor, residual: Tensor, out: Tensor, n: int, eps: float, **_: Any
) -> None:
    residual.copy_(embedding[ids.long()])
    out.copy_(_normed(residual, weight, eps))


def _add_rms_norm_of_partials(
    partials: Tensor, residual: Tensor, weight: Tensor, out: Tensor, n: int, stride: int, eps: float, **options: Any
) -> None:
    parts = partials.as_strided((options["NUM_SPLITS"], *residual.shape), (stride, n, 1))
    residual.copy_(residual.float() + parts.float().sum(0))
    out.copy_(_normed(residual, weight, eps))


def _post_norm(
    x: Tensor, residual: Tensor, post: Tensor, weight: Tensor, out: Tensor, n: int, stride: int, eps: float, **_: Any
) -> None:
    residual.copy_(residual.float() + _normed(x.as_strided(residual.shape, (stride, 1)), post, eps))
    out.copy_(_normed(residual, weight, eps))


def _silu_mul(gate_up: Tensor, out: Tensor, n: int, **options: Any) -> None:
    gate, up = gate_up.view(-1, 2, n).float().unbind(1)
    out.copy_((gelu(gate, approximate="tanh") if options["IS_GELU"] else silu(gate)) * up)


def compute_rows_at_once(patch: pytest.MonkeyPatch) -> None:
    elementwise = "kernels.gpu.elementwise"
    patch.setattr(f"{elementwise}.rms_norm._rms_norm_kernel", Launched(_rms_norm))
    patch.setattr(f"{elementwise}.rms_norm._embed_norm_kernel", Launched(_embed_norm))
    patch.setattr(f"{elementwise}.silu_mul._silu_mul_kernel", Launched(_silu_mul))
    patch.setattr(
        "kernels.gpu.few_rows.partials._add_rms_norm_of_partials_kernel", Launched(_add_rms_norm_of_partials)
    )
    patch.setattr("kernels.gpu.post_norms.post_norm._post_norm_kernel", Launched(_post_norm))
    patch.setattr("kernels.gpu.quantization.packed_linear.dequantize", dequantize_w4)
