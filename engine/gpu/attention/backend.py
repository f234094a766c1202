"""Interfaces of attention on a GPU: `GpuAttention` for all rows of a step, `PrefillAttention` for prompt chunks.

Prefill is planned once a step, on the host, from where each row's queries start and how many keys its last query
sees. The plan holds what the kernels need on the device, and every layer attends with it. Decode is planned on the
device as part of the step, so a captured graph works for any lengths. A backend knows neither requests nor the
scheduler.
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
    """Attention for the prompt tokens of one step, packed row after row."""

    def attend(
        self, qkv: Tensor, pool: Tensor, layer: int, out: Tensor, window: int = 0, sinks: Tensor | None = None
    ) -> None:
        """Compute causal attention of the plan's queries over their rows' keys in the pool.

        qkv: (num_tokens, num_heads + 2 num_kv_heads, head_dim), q and k rotated. The pool already holds the K and V
            of these tokens.
        pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim).
        out: (num_tokens, num_heads * head_dim), contiguous, written.
        window, sinks: see `paged_prefill`. Only our own kernel supports them.
        """
        ...


class PrefillAttention(Protocol):
    """A prefill backend over one pool."""

    @property
    def name(self) -> str:
        """The name that `--attention-backend` takes."""
        ...

    def plan(self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor) -> PrefillPlan:
        """Plan a step.

        query_starts: the first token of each row, counted from the step's first prompt token; last the number of
            tokens. seq_lens: keys that each row's last query sees, so seq_len minus the row's queries is its cached
            context. block_tables: int32 (num_rows, any), on the device.
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The plan of `PagedAttention`. block_tables: int32 (num_rows, any). tiles, splits: see `paged_prefill`."""

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
    """Our Triton kernel, which reads K and V from the paged pool and supports every model."""

    name = "triton"

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self._num_heads = num_heads
        self._group = num_heads // num_kv_heads

    def plan(
        self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor, skipped: Sequence[bool] = ()
    ) -> PagedPlan:
        """Plan a step. skipped: rows that another kernel attends for."""
        tile_m = choose_tile(query_starts[-1], self._num_heads, block_tables.device)
        tiles = prefill_tiles(query_starts, seq_lens, self._group, tile_m)
        if any(skipped):
            tiles = [tile for tile in tiles if not skipped[tile[0]]]
        return PagedPlan(block_tables, upload(tiles, torch.int32, block_tables.device).view(-1, 4), tile_m)


@dataclass(slots=True)
class GroupInputs:
    """Where the layers of one KV group store a step's K and V, and where they read earlier ones.

    slots: int32 (num_tokens,), block id * block_size + offset, or -1 to store nothing.
    decode_tables: block ids, int32 (num_decode_rows, max_blocks).
    prefill: the plan for prompt chunks, from `GpuAttention.plan`; None without chunks.
    decode: the plan for decode rows, set by `GpuAttention.plan_decode`.
    """

    slots: Tensor
    decode_tables: Tensor
    prefill: Any = None
    decode: Any = None


@dataclass(slots=True)
class GpuInputs:
    """A step's tokens on the device: one for each decode row, then the prompt chunks.

    token_ids int64, positions int32: (num_tokens,).
    lengths: int32 (num_decode_rows,), 0 for rows without a request.
    groups: one for each KV group. Either all of them have prompt chunks or none has.
    attended: buffer for the attention output of every layer, (num_tokens or more, num_heads * head_dim). Rows of
        tokens in no tile keep their contents. None: a new buffer, in which those rows are undefined.
    wanted: int64, the tokens whose hidden states a step with prompts returns; None: all.
    query_groups: int32 (3, num_decode_rows), groups of queries of one row that attend together, see `paged_verify`.
        None: every query is a row of its own.
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

    name: the prefill backend's. width: of a token's row in `GpuInputs.attended`. most_queries: in one group, see
    `GpuInputs.query_groups`. split_shape: (KV heads, head_dim) if graphs may split the keys of a prefill tile among
    programs, else None.
    """

    name: str
    width: int
    most_queries: int = 1
    split_shape: tuple[int, int] | None = None

    @abstractmethod
    def __init__(
        self, model: Model, pool: Tensor, max_rows: int, wanted: str, dtype: torch.dtype, max_tokens: int
    ) -> None:
        """wanted: `--attention-backend`. max_tokens: of the largest step; 0: only decode rows. Raises ConfigError."""

    @abstractmethod
    def plan(
        self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Tensor]
    ) -> Sequence[Any]:
        """Plan prompt chunks for each KV group, see `PrefillAttention.plan`. Only `attend` reads the plans."""

    @abstractmethod
    def graph_plan(self, block_tables: Tensor, tiles: Tensor, splits: TileSplits | None = None) -> Any:
        """Return a plan for CUDA graphs, whose kernels do not depend on what these tensors hold.

        tiles: of `prefill_tiles`, or with splits the tiles that are split, see `paged_prefill`.
        """

    @abstractmethod
    def plan_decode(self, inputs: GpuInputs) -> None:
        """Plan the decode rows for all layers, before the step's first kernel."""

    @abstractmethod
    def attend(self, inputs: GpuInputs, block: Any, *queries: Any) -> Tensor:
        """Norm and rotate queries and keys, write K and V to the pool, attend.

        Returns the input of the block's output projection. queries: the output of the block's op.
        """
