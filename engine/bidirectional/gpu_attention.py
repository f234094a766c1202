"""Bidirectional prefill attention on a GPU: prompt by prompt, with torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.bidirectional.attention import NAME, attend


@dataclass(frozen=True, slots=True)
class WholePromptsPlan:
    """query_starts: see PrefillAttention. block_tables: as in other plans; the pool is not read."""

    query_starts: Sequence[int]
    block_tables: Tensor

    def attend(
        self, qkv: Tensor, pool: Tensor, layer: int, out: Tensor, window: int = 0, sinks: Tensor | None = None
    ) -> None:
        """See PrefillPlan: each row of the plan is a whole prompt."""
        kv = slice(-2 * pool.shape[3], None)
        q, (keys, values) = qkv[:, : kv.start], qkv[:, kv].chunk(2, dim=1)
        for start, stop in zip(self.query_starts, self.query_starts[1:], strict=False):
            row = slice(start, stop)
            found = attend(q[row], keys[row].transpose(0, 1), values[row].transpose(0, 1), window)
            out[row] = found.flatten(1)


class BidirectionalPrefill:
    """See PrefillAttention. A prompt of one token is a decode row; it sees only itself in both kinds of attention."""

    name = NAME

    def plan(self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor) -> WholePromptsPlan:
        return WholePromptsPlan(query_starts, block_tables)
