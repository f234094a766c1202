"""GEMMs with 8-bit floating-point weights (e4m3), reference: one scale per output row and one per token.

q_mk = e4m3(x_mk / a_m),  a_m = max_k |x_mk| / 448
y_mn = a_m s_n sum_k q_mk w_nk + b_n
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) -> e4m3 of the same shape and float32 scales (rows,): of weights and of activations alike."""
    largest = x.abs().amax(dim=1).float()
    inverse = FP8_MAX / largest.clamp_min(1e-30)
    return (x.float() * inverse[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE), largest / FP8_MAX


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (rows, in), weight e4m3 (out, in), scales float32 (out,) -> (rows, out) in the dtype of x."""
    values, x_scales = quantize_rows_fp8(x)
    y = functional.linear(values.float(), weight.float()) * (x_scales[:, None] * scales)
    return (y if bias is None else y + bias.float()).to(x.dtype)
