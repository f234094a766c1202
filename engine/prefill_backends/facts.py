"""What a library's attention depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Facts:
    """What the choice of a backend depends on. capability: of an NVIDIA GPU, else None. installed: libraries."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    block_size: int
    capability: tuple[int, int] | None
    installed: frozenset[str]
