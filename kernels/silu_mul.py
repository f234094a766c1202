"""Gated activation: y = silu(gate) * up, with gate and up side by side in one tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels import cpu_rows

SILU = (1.0, 0.0)  # alpha and limit of the gate that is not clamped


def silu_mul(gate_up: Tensor, alpha: float = SILU[0], limit: float = SILU[1]) -> Tensor:
    """(num_tokens, 2 n) -> (num_tokens, n).

    limit: if it is not 0, (up' + 1) gate' sigmoid(alpha gate'), of gate' up to limit and up' from -limit to limit.
    """
    found = cpu_rows.silu_mul(gate_up, alpha, limit)
    if found is not None:
        return found
    gate, up = gate_up.chunk(2, dim=-1)
    if not limit:
        return functional.silu(gate).mul_(up)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))
