"""FlashAttention-3: Hopper's own instructions, rows of any lengths in one launch.

Two packages have its operator. `fa3_fwd` has bfloat16 only and no block tables, so K and V come from `contiguous.py`.
`flash_attn_3`, the whole of it, can follow block tables. Blocks of 64 tokens make it 22% slower over many queries
(they do not come by TMA), so that is for few queries over a cached context, where gathering takes
longer than attention. Nothing is imported before `load`. The causal mask is aligned to each row's last query, as
chunks with context need it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine.gpu.attention.backend import PagedAttention, PrefillPlan
from engine.gpu.pinning import upload
from engine.prefill_backends.contiguous import KeyBuffer, KeysPlan, plan_keys
from engine.prefill_backends.facts import Facts

REQUIREMENT = "fa3-fwd==0.0.3"
HEAD_DIMS = (64, 128)
WITH_PAGES, WITHOUT_PAGES = "flash_attn_3", "fa3_fwd"
MAX_PAGED_HEADS = 1400  # longest row's queries x query heads of a KV head; with more, gathering is faster
Forward = Callable[..., Any]  # torch.ops.fa3_fwd.fwd


def installed_package() -> str:
    """Empty when there is none. Imports nothing."""
    return next((name for name in (WITH_PAGES, WITHOUT_PAGES) if importlib.util.find_spec(name) is not None), "")


def is_installed(device: torch.device) -> bool:
    return bool(installed_package())


def why_not(facts: Facts) -> str:
    """See `choose.py`."""
    if facts.capability is None or facts.capability[0] not in (8, 9):
        return "needs an NVIDIA GPU of compute capability 8 or 9; use triton"
    if facts.dtype != torch.bfloat16:
        return "takes bfloat16 alone; use triton"
    if facts.head_dim not in HEAD_DIMS:
        return f"takes heads of {HEAD_DIMS}, not {facts.head_dim}; use triton"
    return "" if FlashAttention3.name in facts.installed else f"is not installed; run: pip install {REQUIREMENT}"


def open_backend(pool: Tensor, num_heads: int, dtype: torch.dtype, max_tokens: int) -> FlashAttention3:
    """See `choose.py`."""
    return FlashAttention3(load(), pool, num_heads, dtype)


@dataclass(frozen=True, slots=True)
class Operator:
    """follows_tables: whether `forward` takes `page_table`."""

    forward: Forward
    follows_tables: bool


def load() -> Operator:
    """The package's operator. Raises ImportError when it is missing or does not fit this torch."""
    package = installed_package()
    importlib.import_module(f"{package or WITHOUT_PAGES}._C")  # registers the operators
    if package != WITH_PAGES:
        return Operator(torch.ops.fa3_fwd.fwd, follows_tables=False)
    flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    return Operator(torch.ops.flash_attn_3.fwd, not flags["FLASHATTENTION_DISABLE_PAGEDKV"])


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """query_starts, key_starts: int32 (num_rows + 1,), on the device; None for a single row, as are the maxima."""

    forward: Forward
    buffer: KeyBuffer
    keys: KeysPlan
    query_starts: Tensor | None
    key_starts: Tensor | None
    max_queries: int | None
    max_keys: int | None

    def attend(
        self, qkv: Tensor, pool: Tensor, layer: int, out: Tensor, window: int = 0, sinks: Tensor | None = None
    ) -> None:
        """See PrefillPlan."""
        num_kv_heads, _, head_dim = pool.shape[3:]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        if self.query_starts is None:  # 15% faster at 2k tokens, 5% at 8k, than one row through the general case
            qkv = qkv[None]
        q = qkv.narrow(-2, 0, num_heads)
        if self.keys.tiles is None:
            k, v = qkv.narrow(-2, num_heads, num_kv_heads), qkv.narrow(-2, num_heads + num_kv_heads, num_kv_heads)
        else:
            kv = self.buffer.gathered(pool, layer, self.keys)
            k, v = (kv[:1], kv[1:]) if self.query_starts is None else (kv[0], kv[1])
        # num_splits 0: long contexts are split as far as there are idle multiprocessors. 64 queries over 8k keys take
        # 20 us with it and 102 without, 2k over 16k the same.
        self.forward(
            q, k, v, out=out.view(q.shape), cu_seqlens_q=self.query_starts, cu_seqlens_k=self.key_starts,
            max_seqlen_q=self.max_queries, max_seqlen_k=self.max_keys, softmax_scale=1 / math.sqrt(head_dim),
            is_causal=True, num_splits=0,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TablePlan:
    """On the device, int32: query_starts (num_rows + 1,), seq_lens (num_rows,), block_tables (num_rows, any)."""

    forward: Forward
    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_queries: int

    def attend(
        self, qkv: Tensor, pool: Tensor, layer: int, out: Tensor, window: int = 0, sinks: Tensor | None = None
    ) -> None:
        """See PrefillPlan."""
        q = qkv[:, : qkv.shape[1] - 2 * pool.shape[3]]
        k, v = pool[:, layer].transpose(2, 3).unbind(1)
        self.forward(
            q, k, v, out=out.view(q.shape), cu_seqlens_q=self.query_starts, seqused_k=self.seq_lens,
            max_seqlen_q=self.max_queries, page_table=self.block_tables, softmax_scale=1 / math.sqrt(q.shape[2]),
            is_causal=True, num_splits=0,
        )  # fmt: skip


class FlashAttention3:
    """operator: from `load`."""

    name = "fa3"

    def __init__(self, operator: Operator, pool: Tensor, num_heads: int, dtype: torch.dtype) -> None:
        self._forward = operator.forward
        self._must_gather = pool.dtype != dtype
        group = num_heads // pool.shape[3]
        can_follow = operator.follows_tables and not self._must_gather
        self._max_paged_queries = MAX_PAGED_HEADS // group if can_follow else 0
        self._buffer = KeyBuffer(pool, dtype)
        self._paged = PagedAttention(num_heads, pool.shape[3])

    def plan(self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor) -> PrefillPlan:
        num_keys = sum(seq_lens)
        gathers = self._must_gather or num_keys > query_starts[-1]
        longest = max(stop - start for start, stop in pairwise(query_starts))
        if gathers and longest <= self._max_paged_queries:
            columns = upload([list(query_starts), [*seq_lens, 0]], torch.int32, block_tables.device)
            return TablePlan(self._forward, columns[0], columns[1, :-1], block_tables, longest)
        if gathers and not self._buffer.fits(num_keys):
            return self._paged.plan(query_starts, seq_lens, block_tables)
        keys = plan_keys(query_starts, seq_lens, block_tables, gathers)
        if len(seq_lens) == 1:
            return FlashPlan(self._forward, self._buffer, keys, None, None, None, None)
        starts = upload([list(query_starts), keys.starts], torch.int32, block_tables.device)
        return FlashPlan(self._forward, self._buffer, keys, starts[0], starts[1], longest, max(seq_lens))
