"""A KV load: blocks of a peer that somebody here wants to have, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.request import Request
from kvstore.types import BlockId, BlockKey


@dataclass(frozen=True, slots=True)
class KvLoad:
    """Fill `block_ids[i]` with block `positions[i]` of `source`; report with `Engine.finish_load`.

    Without positions there is nothing to fill or report: the source can be let go.
    """

    owner: Request | None  # who waits for the blocks; None: they are for the prefix cache, a prefetch
    source: object
    positions: Sequence[int]
    block_ids: Sequence[BlockId]
    num_tokens: int  # whose KV that is
    block_keys: Sequence[BlockKey] = ()  # of the blocks, for the prefix cache
