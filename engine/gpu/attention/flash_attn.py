"""FlashAttention from the package `flash_attn`, version 2 or 4: it follows block tables, so nothing is gathered.

Rows of any lengths in one launch, through `flash_attn_varlen_func`: `flash_attn_with_kvcache` follows block tables
too, but wants equally many queries of every row. Version 2 needs blocks of a multiple of 256 tokens. Version 4 reads
whole blocks and masks scores, not values: behind a row's last key the pool must hold finite numbers (it starts as 0).

Nothing of the package is imported before `load`. Neither version has been run by us: there is no build for this
torch, so tests hold a stand-in to what the package documents. `auto` never takes this backend.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.gpu.inputs import upload

PACKAGE = "flash_attn"
BLOCK_MULTIPLE = 256  # of version 2


def installed_version() -> str:
    """`4` before `2` when both lie there; empty when neither does. Imports nothing."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        return ""
    folders = spec.submodule_search_locations or ()
    if any((Path(folder) / "cute").is_dir() for folder in folders) and importlib.util.find_spec("cutlass"):
        return "4"
    return "2" if spec.origin else ""  # version 4 alone is a folder without a module of its own


@dataclass(frozen=True, slots=True)
class PagesPlan:
    """On the device, int32: query_starts, key_starts (num_rows + 1,), seq_lens (num_rows,), block_tables."""

    query_starts: Tensor
    key_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_queries: int
    max_keys: int


Attend = Callable[[Tensor, Tensor, Tensor, PagesPlan, float], Tensor]
"""q (tokens, heads, head_dim), strided K and V (num_blocks, block_size, KV heads, head_dim), scale -> like q"""


def load(version: str) -> Attend:
    """The package's function. Raises ImportError when it is missing or does not fit this torch."""
    if version == "4":
        varlen: Callable[..., Any] = importlib.import_module(f"{PACKAGE}.cute").flash_attn_varlen_func

        def attend(q: Tensor, k: Tensor, v: Tensor, plan: PagesPlan, scale: float) -> Tensor:
            out: Tensor | tuple[Tensor, Any] = varlen(
                q, k, v, cu_seqlens_q=plan.query_starts, seqused_k=plan.seq_lens, max_seqlen_q=plan.max_queries,
                max_seqlen_k=plan.max_keys, page_table=plan.block_tables, softmax_scale=scale, causal=True,
            )  # fmt: skip
            return out[0] if isinstance(out, tuple) else out  # with the log-sum-exp

        return attend
    varlen = importlib.import_module(PACKAGE).flash_attn_varlen_func

    def attend_2(q: Tensor, k: Tensor, v: Tensor, plan: PagesPlan, scale: float) -> Tensor:
        out: Tensor = varlen(
            q, k, v, plan.query_starts, plan.key_starts, plan.max_queries, plan.max_keys,
            softmax_scale=scale, causal=True, block_table=plan.block_tables,
        )  # fmt: skip
        return out

    return attend_2


class FlashAttention:
    """attend: from `load`."""

    name = "flash-attn"

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def plan(self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor) -> PagesPlan:
        key_starts = list(accumulate(seq_lens, initial=0))
        columns = upload([list(query_starts), key_starts, [*seq_lens, 0]], torch.int32, block_tables.device)
        longest = max(stop - start for start, stop in pairwise(query_starts))
        return PagesPlan(columns[0], columns[1], columns[2, :-1], block_tables, longest, max(seq_lens))

    def prefill(self, qkv: Tensor, pool: Tensor, layer: int, plan: PagesPlan, out: Tensor) -> None:
        num_kv_heads, _, head_dim = pool.shape[3:]
        q = qkv[:, : qkv.shape[1] - 2 * num_kv_heads]
        k, v = pool[:, layer].transpose(2, 3).unbind(1)
        out.copy_(self._attend(q, k, v, plan, 1 / math.sqrt(head_dim)).flatten(1))
