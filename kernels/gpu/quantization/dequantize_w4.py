"""Dequantizes packed int4 weights of any width for cuBLAS. Layout: `kernels/quantization/w4a16_gemm.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.quantization.nibbles import scale_and_zero
from kernels.quantization.w4a16_gemm import PackedW4

BLOCK = 256  # words per program


@triton.jit
def _dequantize_kernel(
    words_ptr, pairs_ptr, out_ptr, num_words, GROUP: tl.constexpr, PER_CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """PER_CHUNK: words per chunk."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    words = tl.load(words_ptr + row * num_words + at, mask=inside, other=0).to(tl.int32)
    first = at // PER_CHUNK * (4 * PER_CHUNK) + at % PER_CHUNK
    for nibble in tl.static_range(4):
        column = first + nibble * PER_CHUNK
        pairs = tl.load(pairs_ptr + row * (num_words * 4 // GROUP) + column // GROUP, mask=inside, other=0)
        scale, zero = scale_and_zero(pairs)
        value = (((words >> 4 * nibble) & 15) | 0x4B000000).to(tl.float32, bitcast=True)  # 2^23 + w
        weight = (value - 8388616.0) * scale + zero
        tl.store(out_ptr + row * num_words * 4 + column, weight.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize(packed: PackedW4, dtype: torch.dtype) -> Tensor:
    """Dequantize to (out, in), for GEMMs of many rows."""
    n, num_words = packed.words.shape
    out = torch.empty(n, num_words * 4, dtype=dtype, device=packed.words.device)
    _dequantize_kernel[(triton.cdiv(num_words, BLOCK), n)](
        packed.words, packed.scales_and_zeros.view(torch.int32), out, num_words, GROUP=packed.group_size,
        PER_CHUNK=packed.chunk // 4, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out
