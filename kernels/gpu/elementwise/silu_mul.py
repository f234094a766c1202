"""Gated activation on a GPU: y = gate / (1 + exp(-gate)) * up, gate and up next to each other in one tensor.

Computed in float32 and rounded once. GELU can replace SiLU: its tanh approximation is also gate / (1 + exp(-z)), with
another z.
References: `kernels/elementwise.py`, `functional.gelu`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import FastLaunch, overlaps_launches, wait_for_predecessor

BLOCK = 1024  # 4 warps x 32 threads x 8 values: one 16-byte load a thread from each half


@triton.jit
def silu_times(gate, up):
    """Return silu(gate) * up in float32."""
    small = tl.exp(-tl.abs(gate))  # never overflows
    return gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small) * up


@triton.jit
def gate_times(gate, up, IS_GELU: tl.constexpr):
    """Return silu(gate) * up, or gelu(gate) * up by the tanh approximation: 1 + tanh(z) is 2 / (1 + exp(-2 z))."""
    if IS_GELU:
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        small = tl.exp(-tl.abs(twice))
        y = gate * tl.where(twice >= 0, 1.0, small) / (1.0 + small) * up
    else:
        y = silu_times(gate, up)
    return y


@FastLaunch
@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, n, BLOCK: tl.constexpr, IS_GELU: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    gate = tl.load(gate_up_ptr + row * 2 * n + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * n + n + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate_times(gate, up, IS_GELU)
    tl.store(out_ptr + row * n + columns, value.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    """Map (num_tokens, 2 n), contiguous, to (num_tokens, n). At most 65,535 tokens. is_gelu: GELU instead of SiLU."""
    if not gate_up.is_contiguous():
        raise ValueError("gate_up must be contiguous")
    num_tokens, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, n, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        overlaps = overlaps_launches(gate_up)
        _silu_mul_kernel[(triton.cdiv(n, BLOCK), num_tokens)](
            gate_up, out, n, BLOCK=BLOCK, IS_GELU=is_gelu, OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps
        )
    return out
