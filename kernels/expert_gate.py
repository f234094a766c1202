"""The activation between an expert's GEMMs, which some models clamp; references of kernels in `kernels/gpu/moe`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.elementwise import HAS_NATIVE, silu_mul

if HAS_NATIVE:
    from kernels.native import rows as native

SILU = (1.0, 0.0)  # alpha and limit of the gate that is not clamped


def gated(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(num_tokens, 2 n) -> (num_tokens, n).

    limit: if it is not 0, (up' + 1) gate' sigmoid(alpha gate'), of gate' up to limit and up' from -limit to limit.
    """
    if not limit:
        return silu_mul(gate_up)
    if HAS_NATIVE and (found := native.silu_mul(gate_up, alpha, limit)) is not None:
        return found
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))
