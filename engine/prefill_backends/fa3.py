"""FlashAttention-3: Hopper's own instructions, rows of any lengths in one launch.

Two packages have its operator. `fa3_fwd` has bfloat16 only and no block tables, so K and V come from `contiguous.py`.
`flash_attn_3`, the whole of it, can follow block tables. Blocks of 64 tokens make it 22% slower over many queries
(they do not come through the copy engine), so that is for few queries over a cached context, where gathering takes
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

from engine.gpu.attention.paged import PagedAttention, PagedPlan
from engine.gpu.pinning import upload
from engine.prefill_backends.contiguous import KeyBuffer, KeysPlan, plan_keys

WITH_PAGES, WITHOUT_PAGES = "flash_attn_3", "fa3_fwd"
MAX_PAGED_HEADS = 1400  # longest row's queries x query heads of a KV head; with more, gathering is faster
Forward = Callable[..., Any]  # torch.ops.fa3_fwd.fwd


def installed_package() -> str:
    """Empty when there is none. Imports nothing."""
    return next((name for name in (WITH_PAGES, WITHOUT_PAGES) if importlib.util.find_spec(name) is not None), "")


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

    keys: KeysPlan
    query_starts: Tensor | None
    key_starts: Tensor | None
    max_queries: int | None
    max_keys: int | None


@dataclass(frozen=True, slots=True)
class TablePlan:
    """On the device, int32: query_starts (num_rows + 1,), seq_lens (num_rows,), block_tables (num_rows, any)."""

    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_queries: int


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

    def plan(
        self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor
    ) -> FlashPlan | TablePlan | PagedPlan:
        num_keys = sum(seq_lens)
        gathers = self._must_gather or num_keys > query_starts[-1]
        longest = max(stop - start for start, stop in pairwise(query_starts))
        if gathers and longest <= self._max_paged_queries:
            columns = upload([list(query_starts), [*seq_lens, 0]], torch.int32, block_tables.device)
            return TablePlan(columns[0], columns[1, :-1], block_tables, longest)
        if gathers and not self._buffer.fits(num_keys):
            return self._paged.plan(query_starts, seq_lens, block_tables)
        keys = plan_keys(query_starts, seq_lens, block_tables, gathers)
        if len(seq_lens) == 1:
            return FlashPlan(keys, None, None, None, None)
        starts = upload([list(query_starts), keys.starts], torch.int32, block_tables.device)
        return FlashPlan(keys, starts[0], starts[1], longest, max(seq_lens))

    def prefill(self, qkv: Tensor, pool: Tensor, layer: int, plan: FlashPlan | TablePlan, out: Tensor) -> None:
        num_kv_heads, _, head_dim = pool.shape[3:]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        if isinstance(plan, TablePlan):
            q = qkv[:, :num_heads]
            k, v = pool[:, layer].transpose(2, 3).unbind(1)
            self._forward(
                q, k, v, out=out.view(q.shape), cu_seqlens_q=plan.query_starts, seqused_k=plan.seq_lens,
                max_seqlen_q=plan.max_queries, page_table=plan.block_tables,
                softmax_scale=1 / math.sqrt(head_dim), is_causal=True, num_splits=0,
            )  # fmt: skip
            return
        if plan.query_starts is None:  # 15% faster at 2k tokens, 5% at 8k, than one row through the general case
            qkv = qkv[None]
        q = qkv.narrow(-2, 0, num_heads)
        if plan.keys.tiles is None:
            k, v = qkv.narrow(-2, num_heads, num_kv_heads), qkv.narrow(-2, num_heads + num_kv_heads, num_kv_heads)
        else:
            kv = self._buffer.gathered(pool, layer, plan.keys)
            k, v = (kv[:1], kv[1:]) if plan.query_starts is None else (kv[0], kv[1])
        # num_splits 0: long contexts are split as far as there are idle multiprocessors. 64 queries over 8k keys take
        # 20 us with it and 102 without, 2k over 16k the same.
        self._forward(
            q, k, v, out=out.view(q.shape), cu_seqlens_q=plan.query_starts,
            cu_seqlens_k=plan.key_starts, max_seqlen_q=plan.max_queries, max_seqlen_k=plan.max_keys,
            softmax_scale=1 / math.sqrt(head_dim), is_causal=True, num_splits=0,
        )  # fmt: skip
