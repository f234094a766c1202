"""The seams of attention on a GPU: `GpuAttention` of a model's blocks, `PrefillAttention` for chunks of prompts.

A backend for prompts plans a step once, on the host, from where each row's queries start and how many keys its last
query sees; the plan holds whatever the kernels need on the device. `prefill` then runs per layer. A backend knows
nothing of requests or of the scheduler. Decode rows never come there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.models.model import Model

PrefillPlan = Any  # made and read by one backend only; the forward pass hands it through


class PrefillAttention(Protocol):
    """Attends for the prompt tokens of a step, packed one row after the other."""

    @property
    def name(self) -> str:
        """As `--attention-backend` calls it."""
        ...

    def plan(self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor) -> PrefillPlan:
        """What `prefill` needs in every layer of one step, or a `PagedPlan` where the paged kernel shall attend.

        query_starts: each row's first token, counted from the first prompt token of the step, and the number of
            tokens at the end. seq_lens: keys that each row's last query sees; what they exceed the row's queries by
            is its cached context. block_tables: int32 (num_rows, any), on the device.
        """
        ...

    def prefill(self, qkv: Tensor, pool: Tensor, layer: int, plan: PrefillPlan, out: Tensor) -> None:
        """Causal attention of the plan's queries against their rows' keys in the pool.

        qkv: (num_tokens, num_heads + 2 num_kv_heads, head_dim), q and k rotated. The pool has K and V of these
            tokens too.
        pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim).
        out: (num_tokens, num_heads * head_dim), contiguous, written.
        """
        ...


@dataclass(slots=True)
class GroupInputs:
    """Where the layers of one KV group store a step's K and V, and find those that it reads.

    slots: int32 (num_tokens,), block id * block_size + offset, or -1 to store nothing.
    decode_tables: block ids, int32 (num_decode_rows, max_blocks).
    prefill: `GpuAttention.prefill`'s plan for the chunks of prompts, or one for the paged kernel; None when there
        are none.
    """

    slots: Tensor
    decode_tables: Tensor
    prefill: PrefillPlan | None = None


@dataclass(slots=True)
class GpuInputs:
    """Tokens of a step on the device: those of decode rows first, one each, then chunks of prompts.

    token_ids int64, positions int32: (num_tokens,).
    lengths: int32 (num_decode_rows,), 0 for rows without a request.
    groups: of each KV group; all have chunks of prompts, or none has.
    attended: takes attention's output (num_tokens or more, num_heads * head_dim) in every layer; what it holds for
        tokens in no tile stays. None: fresh memory, where that is undefined.
    """

    token_ids: Tensor
    positions: Tensor
    lengths: Tensor
    groups: Sequence[GroupInputs]
    attended: Tensor | None = None

    @property
    def has_prompts(self) -> bool:
        return self.groups[0].prefill is not None


class GpuAttention(ABC):
    """Attention of a model's blocks over one pool, for decode rows and prompts. Its workspaces serve one stream.

    prefill: what plans, and attends, for prompts. width: of the memory that a token's output takes, see
        `GpuInputs.attended`.
    """

    prefill: PrefillAttention
    width: int

    @abstractmethod
    def __init__(
        self, model: Model, pool: Tensor, max_rows: int, wanted: str, dtype: torch.dtype, max_tokens: int
    ) -> None:
        """wanted: `--attention-backend`. max_tokens: of the largest step. Raises ConfigError."""

    @abstractmethod
    def attend(self, inputs: GpuInputs, block: Any, *queries: Any) -> Tensor:
        """Norm and rotate, store what the pool keeps, attend. Returns the input of the block's output projection.

        queries: what the ops of this kind of blocks give.
        """
