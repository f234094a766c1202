"""What GPU ops are chosen for, and what they are given in a step."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.errors import UnsupportedModelError
from engine.layers.attention import Attention
from engine.layers.block import Block

MANY_ROWS = sys.maxsize


@dataclass(frozen=True, slots=True)
class Target:
    """A class of steps. num_rows: tokens, or MANY_ROWS for more than any kernel is tuned for."""

    num_rows: int
    is_decode: bool  # no chunks of prompts


class Attend(Protocol):
    """Norms and rotates q and k, stores K and V, attends.

    qkv: (num_tokens, heads + 2 kv_heads, head_dim), changed in place, or split-K partials (num_splits, ...).
    Returns (num_tokens, heads * head_dim). spreads_next: see `rope_and_write_kv`.
    """

    def __call__(self, block: Attention, qkv: Tensor, spreads_next: bool = True) -> Tensor: ...


@dataclass(slots=True)
class GpuStep:
    """The inputs of one forward pass. token_ids: (num_tokens,)."""

    token_ids: Tensor
    attend: Attend


def no_op(block: Block) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(block).__name__} blocks have no GPU kernels yet: use --device cpu")
