"""MXFP4 weights: numbers of 4 bits (e2m1) that share a power of two in groups of 32 columns. Packing and reference.

    w_nk = q_nk 2^(e_ng - 127),  g = k // 32

q: a sign in bit 3, above an index into MAGNITUDES. Words hold four of them as `kernels/w4a16_gemm.py` says, since
kernels unpack both alike; checkpoints hold blocks of 16 bytes, the number of the even column in the low half.
Defined by the OCP Microscaling formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.w4a16_gemm import pack_words, unpack_words

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP_SIZE = 32
EXPONENT_BIAS = 127


def pack_mxfp4(blocks: Tensor) -> Tensor:
    """A checkpoint's uint8 (..., columns / 32, 16) -> words, int16 (..., columns / 4). Exponents stay as they are."""
    return pack_words(torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-3))


def dequantize_mxfp4(words: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """words (..., columns / 4), exponents uint8 (..., columns / 32) -> (..., columns), exact but for `dtype`."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=words.device)
    groups = values[unpack_words(words).int()].view(*exponents.shape, GROUP_SIZE)
    return torch.ldexp(groups, exponents.int()[..., None] - EXPONENT_BIAS).flatten(-2).to(dtype)
