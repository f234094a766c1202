"""Leases on prompts that this worker computes for peers. Called from the engine process's loop only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.kv.manager import KVManager
from engine.request import RequestId
from engine.scheduled_step import PromptChunk
from kvstore.pool.leases import Lease
from kvstore.types import BlockId
from worker.engine_process.open_request import OpenRequest
from worker.kv.kv_leases import Exported, KvLeases
from worker.messages import KvOffer


class PromptLeases:
    """Link between the engine, which computes prompts, and the leases on their blocks."""

    def __init__(self, kv: KVManager, leases: KvLeases) -> None:
        """kv: the engine's."""
        self._kv = kv
        self._leases = leases

    def lease_parts(
        self, chunks: Iterable[PromptChunk], requests: Mapping[RequestId, OpenRequest], now: float
    ) -> Iterable[tuple[Lease, KvOffer]]:
        """Lease what a step's chunks have added to prompts: nothing, before all of a prompt is computed."""
        return ()

    def lease_prompt(self, entry: OpenRequest, now: float) -> Exported:
        """Lease the blocks of a request that ended with PREFILLED: the KV of all its tokens but the last.

        A step in flight may be computing that one into one block more.
        """
        num_tokens = entry.request.num_known_tokens - 1
        block_ids = self._kv.detach(entry.request, num_tokens)
        return self._leases.grant(block_ids, self._digests(entry, block_ids), num_tokens, now)

    def _digests(self, entry: OpenRequest, block_ids: list[BlockId]) -> list[list[int]]:
        """Digests of the blocks of a prompt, by rank."""
        return self._leases.digests(block_ids)
