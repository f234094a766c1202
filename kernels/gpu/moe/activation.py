"""The activation of experts, on float32 numbers in a GPU kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.elementwise.silu_mul import silu_times


@triton.jit
def clamped_times(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Compute silu(gate) * up; with LIMIT the clamped (up' + 1) gate' sigmoid(ALPHA gate') of `stacked_moe.py`."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        y = silu_times(gate * ALPHA, tl.clamp(up, -LIMIT, LIMIT) + 1.0) / ALPHA
    else:
        y = silu_times(gate, up)
    return y
