"""GEMMs with int8 weights, reference: one scale per output row, and int8 or plain activations.

    q_mk = round(x_mk / a_m),  a_m = max_k |x_mk| / 127           per token, or x as it is
    y_mn = a_m s_n sum_k q_mk w_nk + b_n

The sum over k is one of integers: it does not depend on its order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

INT8_MAX = 127.0


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) -> int8 of the same shape and float32 scales (rows,): of weights and of activations alike."""
    largest = x.abs().amax(dim=1).float()
    inverse = INT8_MAX / largest.clamp_min(1e-30)
    values = (x.float() * inverse[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return values.to(torch.int8), largest / INT8_MAX


def w8a8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (rows, in), weight int8 (out, in), scales float32 (out,) -> (rows, out) in the dtype of x."""
    values, x_scales = quantize_rows_int8(x)
    sums = functional.linear(values.double(), weight.double())  # exact: below 2^53
    y = sums.float() * (x_scales[:, None] * scales)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def w8a16_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`w8a8_linear` with x as it is."""
    y = functional.linear(x.float(), weight.float()) * scales
    return (y if bias is None else y + bias.float()).to(x.dtype)
