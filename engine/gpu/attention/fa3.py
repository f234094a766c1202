"""FlashAttention-3 from the package `fa3-fwd`: Hopper's own instructions, rows of any lengths in one launch.

The package's build has bfloat16 only and no block tables, so K and V come from `contiguous.py`. Nothing of it is
imported before `load`. Its causal mask is aligned to each row's last query, as chunks with context need it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine.gpu.attention.contiguous import KeyBuffer, KeysPlan, plan_keys
from engine.gpu.attention.paged import PagedAttention, PagedPlan
from engine.gpu.inputs import upload

PACKAGE = "fa3_fwd"
Forward = Callable[..., Any]  # torch.ops.fa3_fwd.fwd


def load() -> Forward:
    """The package's operator. Raises ImportError when it is missing or does not fit this torch."""
    importlib.import_module(f"{PACKAGE}._C")  # registers the operators
    operator: Forward = torch.ops.fa3_fwd.fwd
    return operator


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """query_starts, key_starts: int32 (num_rows + 1,), on the device; None for a single row, as are the maxima."""

    keys: KeysPlan
    query_starts: Tensor | None
    key_starts: Tensor | None
    max_queries: int | None
    max_keys: int | None


class FlashAttention3:
    """forward: from `load`."""

    name = "fa3"

    def __init__(self, forward: Forward, pool: Tensor, num_heads: int, dtype: torch.dtype) -> None:
        self._forward = forward
        self._must_gather = pool.dtype != dtype
        self._buffer = KeyBuffer(pool, dtype)
        self._paged = PagedAttention(num_heads, pool.shape[3])

    def plan(
        self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor
    ) -> FlashPlan | PagedPlan:
        num_keys = sum(seq_lens)
        gathers = self._must_gather or num_keys > query_starts[-1]
        if gathers and not self._buffer.fits(num_keys):
            return self._paged.plan(query_starts, seq_lens, block_tables)
        keys = plan_keys(query_starts, seq_lens, block_tables, gathers)
        if len(seq_lens) == 1:
            return FlashPlan(keys, None, None, None, None)
        starts = upload([list(query_starts), keys.starts], torch.int32, block_tables.device)
        longest = max(stop - start for start, stop in pairwise(query_starts))
        return FlashPlan(keys, starts[0], starts[1], longest, max(seq_lens))

    def prefill(self, qkv: Tensor, pool: Tensor, layer: int, plan: FlashPlan | PagedPlan, out: Tensor) -> None:
        if isinstance(plan, PagedPlan):
            self._paged.prefill(qkv, pool, layer, plan, out)
            return
        num_kv_heads, _, head_dim = pool.shape[3:]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
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
