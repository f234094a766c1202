"""MXFP4 weights: numbers of 4 bits (e2m1) that share a power of two in groups of 32 columns. Packing and reference.

    w_nk = q_nk 2^(e_ng - 127),  g = k // 32

q: a sign in bit 3, above an index into MAGNITUDES. A checkpoint holds blocks of 16 bytes, the number of the even
column in the low half. Kernels read words of four, of the columns that `kernels/w4a16_gemm.py` says, with the bits of
number i at SHIFTS[i]: so they are where a float16 has them after few shifts. Defined by the OCP Microscaling formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.w4a16_gemm import chunk_of

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP_SIZE = 32
EXPONENT_BIAS = 127
SHIFTS = ((15, 9), (12, 6), (14, 3), (13, 0))  # of the sign, and of the lowest of the other bits


def pack_mxfp4(blocks: Tensor) -> Tensor:
    """A checkpoint's uint8 (..., columns / 32, 16) -> words, int16 (..., columns / 4). Exponents stay as they are."""
    numbers = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-3)
    chunk = chunk_of(numbers.shape[-1])
    quarters = numbers.view(*numbers.shape[:-1], -1, 4, chunk // 4)
    words = torch.zeros_like(quarters[..., 0, :], dtype=torch.int32)
    for index, (sign, others) in enumerate(SHIFTS):
        number = quarters[..., index, :].int()
        words |= ((number >> 3) << sign) | ((number & 7) << others)
    return words.to(torch.int16).flatten(-2)


def dequantize_mxfp4(words: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """words (..., columns / 4), exponents uint8 (..., columns / 32) -> (..., columns), exact but for `dtype`."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=words.device)
    bits = words.int().view(*words.shape[:-1], -1, 1, chunk_of(words.shape[-1] * 4) // 4)
    signs, others = (torch.tensor(shifts, device=words.device)[:, None] for shifts in zip(*SHIFTS, strict=True))
    numbers = (((bits >> signs) & 1) << 3) | ((bits >> others) & 7)
    groups = values[numbers.flatten(-3)].view(*exponents.shape, GROUP_SIZE)
    return torch.ldexp(groups, exponents.int()[..., None] - EXPONENT_BIAS).flatten(-2).to(dtype)
