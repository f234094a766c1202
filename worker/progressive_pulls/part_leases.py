"""Leases on parts of prompts while the rest is computed.

A part is the full blocks that a chunk, except the last one, adds; see docs/decisions/prefill-decode-hand-off.md.
Called only from the engine process's loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from engine.progressive_pulls.parts import are_first, part_blocks
from engine.request import RequestId, RequestStatus
from engine.scheduled_step import PromptChunk
from kvstore.pool.leases import Lease
from kvstore.types import BlockId
from protos import types_pb2 as pb
from worker.config import WorkerConfig
from worker.engine_process.figures import OpenRequest
from worker.kv.kv_leases import PromptLeases
from worker.progressive_pulls.settings import ProgressivePullSettings


def kind_of_leases(worker: WorkerConfig) -> type[PromptLeases]:
    """Return the class of prompt leases: with parts, if they are enabled."""
    return PartLeases if worker.of(ProgressivePullSettings).progressive_pull else PromptLeases


class PartLeases(PromptLeases):
    """Also leases prompts while they are computed."""

    def lease_parts(
        self, chunks: Iterable[PromptChunk], requests: Mapping[RequestId, OpenRequest], now: float
    ) -> Iterator[tuple[Lease, pb.KvOffer]]:
        """Lease the blocks that a step's chunks have added to prompts."""
        for chunk in chunks:
            request = chunk.request
            entry = requests.get(request.request_id)
            # A preempted prompt may get other blocks, for which the kept digests would be wrong.
            is_steady = request.status is RequestStatus.RUNNING and not request.num_preemptions
            if entry is None or not is_steady:
                continue
            first, last = _num_leased(entry), chunk.num_tokens // self._kv.block_size
            if last > first and part_blocks(self._kv, request, first, last):
                yield self._lease_part(entry, first, last, now)

    def _lease_part(self, entry: OpenRequest, first: int, last: int, now: float) -> tuple[Lease, pb.KvOffer]:
        request, kv = entry.request, self._kv
        kv.prefixes.extend_keys(request)
        block_ids = part_blocks(kv, request, first, last)
        digests = self._leases.digests(block_ids)
        kv.pool.acquire(block_ids)
        lease, handle = self._leases.grant(block_ids, digests, len(block_ids) * kv.block_size, now)
        entry.part_digests = _appended(entry.part_digests, digests)
        keys = request.block_keys[first:last]
        return lease, pb.KvOffer(request_id=request.request_id, kv_handle=handle, block_keys=keys)

    def _digests(self, entry: OpenRequest, block_ids: list[BlockId]) -> list[list[int]]:
        """Return digests of the prompt's blocks: the leased parts' are known, if they are the first of these."""
        if entry.request.num_preemptions or not are_first(self._kv):
            entry.part_digests = []
        return _appended(entry.part_digests, self._leases.digests(block_ids[_num_leased(entry) :]))


def _num_leased(entry: OpenRequest) -> int:
    """Return the number of leading blocks of the prompt that have been leased in parts."""
    return len(entry.part_digests[0]) if entry.part_digests else 0


def _appended(digests: list[list[int]], more: list[list[int]]) -> list[list[int]]:
    """Append digests of the following blocks, by rank."""
    return [known + new for known, new in zip(digests, more, strict=True)] if digests else more
