"""Gumbel noise of tokens on a GPU, a function of only (seed, position, token); formulas in `kernels/gumbel.py`."""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _splitmix64(value):
    value = value + _GOLDEN
    value = (value ^ (value >> 30)) * _MIX_A
    value = (value ^ (value >> 27)) * _MIX_B
    return value ^ (value >> 31)


@triton.jit
def gumbel(seed, position, ids):
    """Return -log E of `exponential_noise(noise_key(seed, position), ids)`, up to rounding."""
    mixed = _splitmix64(_splitmix64(seed.to(tl.uint64)) + position.to(tl.uint64) * _GOLDEN)
    bits = ids * -1640531527 + mixed.to(tl.uint32).to(tl.int32, bitcast=True)
    bits ^= bits >> 15
    bits *= -2048144789
    bits ^= (mixed >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    bits ^= bits >> 13
    bits *= -1028477387
    bits ^= bits >> 16
    bits &= 0x7FFFFFFF
    uniform = (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10
    # -log(1 - u), exact also for small u: log(w) u / (w - 1) with w = 1 - u as rounded.
    rest = 1.0 - uniform
    exponential = tl.where(rest == 1.0, uniform, tl.log(rest) * uniform / tl.where(rest == 1.0, 1.0, rest - 1.0))
    return -tl.log(exponential)
