"""Counter-based sampling noise: exponential variates as a pure function of (seed, position, token id).

The token that minimizes E_i / p_i, with E_i exponential, is distributed like p; -log E_i is Gumbel noise. Because
each E_i depends only on these three numbers, the sampled token is the same in any batch, chunking, worker or device.

(seed, position) is hashed to two 32-bit keys on the host (splitmix64); each token id is mixed with them by two rounds
of xor-shift and multiply in wrapping int32 arithmetic, which gives the same result on CPUs and GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Return two signed 32-bit keys for the token sampled at `position` (an index into the sequence) under `seed`."""
    mixed = _splitmix64((_splitmix64(seed & _MASK64) + position * _GOLDEN) & _MASK64)
    return _signed32(mixed & 0xFFFFFFFF), _signed32(mixed >> 32)


def exponential_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Compute noise: keys int32 (rows, 2), token_ids int32 (rows or 1, n) -> float32 (rows, n), above 2^-33."""
    bits = token_ids * _signed32(0x9E3779B9)
    bits = bits + keys[:, :1]
    bits ^= bits >> 15
    bits *= _signed32(0x85EBCA6B)
    bits ^= keys[:, 1:]
    bits ^= bits >> 13
    bits *= _signed32(0xC2B2AE35)
    bits ^= bits >> 16
    bits &= 0x7FFFFFFF
    # -log(1 - u): small u stay exact in float32, so rare tokens keep their exact probability.
    uniform = bits.to(torch.float32).add_(0.5).mul_(-(2.0**-31))
    return uniform.log1p_().neg_()


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _signed32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
