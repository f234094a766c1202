"""Reference of GEMMs with 8-bit weights: int8 or e4m3, with one scale per output row and one per row of x.

    q_mk = round(x_mk / a_m),  a_m = max_k |x_mk| / MAX           per token, or x unquantized
    y_mn = a_m s_n sum_k q_mk w_nk + b_n

MAX is 127, or 448 for e4m3. For int8 the sum over k is one of integers, so it does not depend on the order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

INT8_MAX = 127.0
FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weights or activations (rows, columns) to int8 of the same shape and float32 scales (rows,)."""
    values, scales = _scale_rows(x, INT8_MAX)
    return values.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), scales


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e4m3, like `quantize_rows_int8`."""
    values, scales = _scale_rows(x, FP8_MAX)
    return values.clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE), scales


def quantized_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x (rows, in), weight int8 or e4m3 (out, in), scales float32 (out,): (rows, out) in the dtype of x."""
    is_int8 = weight.dtype == torch.int8
    values, x_scales = (quantize_rows_int8 if is_int8 else quantize_rows_fp8)(x)
    wide = torch.float64 if is_int8 else torch.float32  # sums of int8 are exact below 2^53
    y = functional.linear(values.to(wide), weight.to(wide)).float() * (x_scales[:, None] * scales)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def w8a16_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `quantized_linear` without quantizing x."""
    y = functional.linear(x.float(), weight.float()) * scales
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _scale_rows(x: Tensor, largest_value: float) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax(dim=1).float()
    return x.float() * (largest_value / largest.clamp_min(1e-30))[:, None], largest / largest_value
