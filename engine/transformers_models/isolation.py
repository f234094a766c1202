"""Check that tokens of a model see each other in attention only.

A step batches tokens of several sequences, in chunks and in any order. A layer with its own state (recurrent,
convolutional), an embedding of n-grams, or positions counted from the start of the input would give wrong answers,
and no config field lists all of them. So the model runs once with its real weights and without attention: each
token's hidden state must depend on its id and position alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError, UnsupportedModelError
from engine.transformers_models.seam import Call, connect

POSITIONS = (0, 1, 5, 11, 12, 17)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Relative to the largest number. Tiny models of 37 families: at most 2e-7, and nothing at all in 16 bits."""


def own_token(call: Call) -> Tensor:
    """What stands for attention: a function of the token's own q, k and v, in which positions are seen."""
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) for each in (call.k, call.v))
    size = call.q.shape[-1]
    ramp = torch.linspace(-1, 1, size, dtype=call.q.dtype, device=call.q.device)
    gate = 1 + ((call.q + k) * ramp).mean(-1, keepdim=True).tanh()
    return (gate * v).transpose(1, 2).contiguous()


def check_isolation(hf: Any, vocab_size: int, num_positions: int) -> None:
    """Raise UnsupportedModelError for a model whose tokens see each other outside its attention.

    Raises ConfigError for weights that overflow.
    """
    for module in hf.modules():
        connect(module, own_token)
    positions = torch.tensor([position for position in POSITIONS if position < num_positions])
    count = len(positions)
    ids = torch.arange(3, 3 + 7 * count, 7) % vocab_size
    alone = hidden_of(hf, ids, positions)
    order = torch.arange(count - 1, -1, -1)
    others = hidden_of(hf, ids[order], positions[order])[order]
    if not bool(torch.isfinite(alone).all()):
        raise ConfigError(f"the weights give numbers that are not finite in {alone.dtype}: choose another --dtype")
    error = float((alone - others).abs().amax() / alone.abs().amax())
    if not error <= TOLERANCE[alone.dtype]:
        raise UnsupportedModelError(
            "its tokens see each other outside its attention (a recurrent or convolutional state), or it ignores the "
            "positions that it is given"
        )


def hidden_of(hf: Any, ids: Tensor, positions: Tensor) -> Tensor:
    found = hf.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False, return_dict=True)
    hidden: Tensor = found[0][0]
    return hidden
