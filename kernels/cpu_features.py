"""Which fast GEMMs this CPU has."""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_bfloat16_gemms() -> bool:
    """Whether oneDNN multiplies bfloat16 here, which takes AVX-512 on x86.

    Elsewhere torch multiplies bfloat16 one number at a time: 512 rows of x times [1536, 576] take 100 ms on one core,
    FBGEMM with the weight in float16 takes 12.7.
    """
    return torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
