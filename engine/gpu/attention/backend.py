"""The seams of attention on a GPU: `GpuAttention` of a model's blocks, `PrefillAttention` for chunks of prompts, of
which `PagedAttention` always works.

A step is planned once, on the host, from where each row's queries start and how many keys its last query sees; the
plan holds whatever the kernels need on the device, and attends in every layer. A backend knows nothing of requests or
of the scheduler. Decode rows are planned on the device, as a part of the step: a graph follows the lengths it gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.gpu.pinning import upload
from engine.models.model import Model
from kernels.gpu.attention.paged_prefill import TileSplits, paged_prefill
from kernels.gpu.attention.prompt_tiles import choose_tile, prefill_tiles


class PrefillPlan(Protocol):
    """Attends for the prompt tokens of one step, packed one row after the other."""

    def attend(
        self, qkv: Tensor, pool: Tensor, layer: int, out: Tensor, window: int = 0, sinks: Tensor | None = None
    ) -> None:
        """Causal attention of the plan's queries against their rows' keys in the pool.

        qkv: (num_tokens, num_heads + 2 num_kv_heads, head_dim), q and k rotated. The pool has K and V of these
            tokens too.
        pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim).
        out: (num_tokens, num_heads * head_dim), contiguous, written.
        window, sinks: see `paged_prefill`; of models that have any, which our kernel alone takes.
        """
        ...


class PrefillAttention(Protocol):
    """A backend for prompts over one pool."""

    @property
    def name(self) -> str:
        """As `--attention-backend` calls it."""
        ...

    def plan(self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor) -> PrefillPlan:
        """Plan a step.

        query_starts: each row's first token, counted from the first prompt token of the step, and the number of
            tokens at the end. seq_lens: keys that each row's last query sees; what they exceed the row's queries by
            is its cached context. block_tables: int32 (num_rows, any), on the device.
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A plan of `PagedAttention`. block_tables: int32 (num_rows, any). tiles, splits: see `paged_prefill`."""

    block_tables: Tensor
    tiles: Tensor
    tile_m: int
    splits: TileSplits | None = None

    def attend(
        self, qkv: Tensor, pool: Tensor, layer: int, out: Tensor, window: int = 0, sinks: Tensor | None = None
    ) -> None:
        """See PrefillPlan."""
        q = qkv[:, : qkv.shape[1] - 2 * pool.shape[3]]
        paged_prefill(
            q, pool, layer, self.block_tables, self.tiles, self.tile_m, out, window=window, sinks=sinks,
            splits=self.splits,
        )  # fmt: skip


class PagedAttention:
    """The backend that always works: our Triton kernel, which reads K and V where they lie in the pool."""

    name = "triton"

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self._num_heads = num_heads
        self._group = num_heads // num_kv_heads

    def plan(
        self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor, skipped: Sequence[bool] = ()
    ) -> PagedPlan:
        """skipped: of each row, whether somebody else attends for it."""
        tile_m = choose_tile(query_starts[-1], self._num_heads, block_tables.device)
        tiles = prefill_tiles(query_starts, seq_lens, self._group, tile_m)
        if any(skipped):
            tiles = [tile for tile in tiles if not skipped[tile[0]]]
        return PagedPlan(block_tables, upload(tiles, torch.int32, block_tables.device).view(-1, 4), tile_m)


@dataclass(slots=True)
class GroupInputs:
    """Where the layers of one KV group store a step's K and V, and find those that it reads.

    slots: int32 (num_tokens,), block id * block_size + offset, or -1 to store nothing.
    decode_tables: block ids, int32 (num_decode_rows, max_blocks).
    prefill: `GpuAttention.plan`'s for the chunks of prompts; None when there are none.
    decode: set by `GpuAttention.plan_decode`, for the decode rows.
    """

    slots: Tensor
    decode_tables: Tensor
    prefill: Any = None
    decode: Any = None


@dataclass(slots=True)
class GpuInputs:
    """Tokens of a step on the device: those of decode rows first, one each, then chunks of prompts.

    token_ids int64, positions int32: (num_tokens,).
    lengths: int32 (num_decode_rows,), 0 for rows without a request.
    groups: of each KV group; all have chunks of prompts, or none has.
    attended: takes attention's output (num_tokens or more, num_heads * head_dim) in every layer; what it holds for
        tokens in no tile stays. None: fresh memory, where that is undefined.
    wanted: int64, tokens whose hidden states are asked for, in steps with prompts; None: all.
    query_groups: where rows have several queries, which attend in groups, int32 (3, num_decode_rows), see
        `paged_verify`. None: each query is a row of its own.
    """

    token_ids: Tensor
    positions: Tensor
    lengths: Tensor
    groups: Sequence[GroupInputs]
    attended: Tensor | None = None
    wanted: Tensor | None = None
    query_groups: Tensor | None = None

    @property
    def has_prompts(self) -> bool:
        return self.groups[0].prefill is not None


class GpuAttention(ABC):
    """Attention of a model's blocks over one pool, for decode rows and prompts. Its workspaces serve one stream.

    name: of the backend for prompts. width: of the memory that a token's output takes, see `GpuInputs.attended`.
    most_queries: of a group, see `GpuInputs.query_groups`. split_shape: (KV heads, head_dim) where graphs
    may split the keys of prompts' tiles among programs; None: tiles stay whole.
    """

    name: str
    width: int
    most_queries: int = 1
    split_shape: tuple[int, int] | None = None

    @abstractmethod
    def __init__(
        self, model: Model, pool: Tensor, max_rows: int, wanted: str, dtype: torch.dtype, max_tokens: int
    ) -> None:
        """wanted: `--attention-backend`. max_tokens: of the largest step; 0: it attends for decode rows alone. Raises
        ConfigError.
        """

    @abstractmethod
    def plan(
        self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Tensor]
    ) -> Sequence[Any]:
        """Plan chunks of prompts for each KV group, see `PrefillAttention.plan`. `attend` alone reads its plans."""

    @abstractmethod
    def graph_plan(self, block_tables: Tensor, tiles: Tensor, splits: TileSplits | None = None) -> Any:
        """A plan for graphs, which runs the same kernels whatever these tensors hold. tiles: of `prefill_tiles`, or
        with splits those that they are of, see `paged_prefill`.
        """

    @abstractmethod
    def plan_decode(self, inputs: GpuInputs) -> None:
        """Plan a step's decode rows for all layers, before the first of its kernels."""

    @abstractmethod
    def attend(self, inputs: GpuInputs, block: Any, *queries: Any) -> Tensor:
        """Norm and rotate, store what the pool keeps, attend. Returns the input of the block's output projection.

        queries: what the ops of this kind of blocks give.
        """
