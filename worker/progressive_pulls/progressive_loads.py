"""Loads of requests, and prefetches of parts of prompts that a peer is still computing.

Called only from the engine process's loop.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import cast

from engine.engine import Engine
from engine.progressive_pulls.metrics import OUTCOMES
from engine.progressive_pulls.remote_kv import ProgressiveRemoteKv
from engine.request import RequestId
from engine.scheduled_step import KvLoad
from engine.wings import Figures
from kvstore.handle.handle import PeerLease
from kvstore.types import BlockKey, WorkerId
from protos import types_pb2 as pb
from worker.engine_process.figures import OpenRequest
from worker.kv.kv_loads import KvLoads, KvPuller
from worker.messages import Pull, StepReport

logger = logging.getLogger("engine")


class ProgressiveLoads(KvLoads):
    """Links the engine with the puller for both kinds of loads; a prefetch is a load without an owner."""

    def __init__(self, engine: Engine, puller: KvPuller, fence: Callable[[], None], can_read: bool = True) -> None:
        super().__init__(engine, puller, fence, can_read)
        self._transports: dict[WorkerId, str] = {}  # of the last prefetch from each peer
        self._outcomes: Counter[str] = Counter()
        self._num_tokens = 0  # pulled
        self._has_news = False
        engine.counting = [*engine.counting, self]

    def prefetch(self, offer: pb.KvOffer) -> None:
        """Offer the engine a part of a prompt that the peer is still computing."""
        if not offer.block_keys:
            super().prefetch(offer)
            return
        lease = self._open(offer.kv_handle)
        if lease is None:
            return
        block_keys = [BlockKey(key) for key in offer.block_keys]
        num_blocks = len(block_keys)
        if num_blocks != lease.num_blocks or lease.num_tokens != num_blocks * self._kv.block_size:
            logger.warning("a KV handle that is not of full blocks with their keys: not prefetched")
            self.abandon(lease)
            return
        cast("ProgressiveRemoteKv", self._engine.remote_kv).prefetch(lease, block_keys)

    def figures(self) -> Figures:
        """See `engine.wings.Counting`. Empty while nothing has changed, which costs nothing in a step."""
        if not self._has_news:
            return {}
        self._has_news = False
        return {
            "mini_infer_kv_prefetches": [self._outcomes[name] for name in OUTCOMES],
            "mini_infer_kv_prefetched_tokens": [self._num_tokens],
        }

    def _skip(self, load: KvLoad, entry: OpenRequest | None) -> None:
        super()._skip(load, entry)
        if load.owner is None:
            self._count("skipped")
        elif entry is not None and load.owner.num_prefetched_tokens:
            assert isinstance(load.source, PeerLease)
            entry.times.transport = self._transports.get(load.source.worker_id, "")

    def _report_end(
        self, load: KvLoad, pull: Pull, requests: Mapping[RequestId, OpenRequest], report: StepReport, now: float
    ) -> None:
        if load.owner is not None:
            super()._report_end(load, pull, requests, report, now)
        elif pull.ok:
            assert isinstance(load.source, PeerLease)
            self._transports[load.source.worker_id] = pull.transport
            self._count("pulled", load.num_tokens)
            report.pulls.append(pull)
        else:
            logger.warning("KV prefetch failed: %s", pull.error)
            self._count("failed")

    def _count(self, outcome: str, num_tokens: int = 0) -> None:
        self._outcomes[outcome] += 1
        self._num_tokens += num_tokens
        self._has_news = True
