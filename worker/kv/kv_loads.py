"""KV loads: a peer's leases are kept alive, read into blocks that the engine reserved, and released.

Called from the engine process's loop only; the copying is done by the threads of `KvPuller`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from common.errors import MiniInferError
from common.logging import about
from engine.engine import Engine
from engine.request import RequestId
from engine.scheduled_step import KvLoad
from kvstore.handle.handle import KvHandle, PeerLease, open_handle
from kvstore.types import BlockKey
from worker.engine_process.figures import OpenRequest
from worker.kv.kv_puller import KvPuller
from worker.messages import Pull, StepReport

logger = logging.getLogger("engine")


class KvLoads:
    """Link between the engine, which reserves blocks for loads, and the puller, which fills them."""

    def __init__(self, engine: Engine, puller: KvPuller, fence: Callable[[], None], can_read: bool = True) -> None:
        """fence: marks that blocks are about to be given to loads, after the steps launched so far.

        can_read: whether all of the pool is in reach; else no handle is accepted.
        """
        self._can_read = can_read
        self._engine = engine
        self._kv = engine.kv
        self._puller = puller
        self._fence = fence

    @property
    def num_open(self) -> int:
        return self._puller.num_open

    def accept(self, handle: KvHandle | None, num_tokens: int, request_id: RequestId) -> PeerLease | None:
        """Keep the handle's lease alive. None unless it is on the KV of exactly `num_tokens`: compute that here."""
        lease = None if handle is None else self._open(handle, request_id)
        if lease is None:
            return None
        if lease.num_tokens != num_tokens or lease.num_blocks != self._kv.num_blocks_to_load(num_tokens):
            text = "a KV handle does not cover its request: computing the prompt here"
            logger.warning(text, extra=about(request_id))
            self.abandon(lease)
            return None
        return lease

    def refuse(self, handle: KvHandle) -> None:
        """Release the lease of a handle whose request was refused."""
        self.abandon(self._open(handle))

    def abandon(self, source: object | None) -> None:
        """Release the lease, if there is one, that a request does not need any more."""
        if source is not None:
            assert isinstance(source, PeerLease)
            self._puller.abandon(source)

    def close(self) -> None:
        """Let all leases go: this process ends."""
        self._puller.close()

    def prefetch(self, handle: KvHandle, block_keys: Sequence[BlockKey]) -> None:
        """Take up a part of a prompt that the peer is still computing: here it is let go."""
        self.refuse(handle)

    def start(self, loads: Sequence[KvLoad], requests: Mapping[RequestId, OpenRequest], now: float) -> None:
        """Pull what a step has reserved blocks for, which no step in flight uses."""
        for load in loads:
            entry = None if load.owner is None else requests.get(load.owner.request_id)
            if not load.positions:
                self._skip(load, entry)
                continue
            if entry is not None:
                entry.start_pull(load.num_tokens, now)
            self._puller.load(load)

    def _skip(self, load: KvLoad, entry: OpenRequest | None) -> None:
        """Let the source of a load go that nothing is to be pulled from. entry: of the request, if that is open."""
        self.abandon(load.source)

    def start_after_steps(
        self, loads: Sequence[KvLoad], requests: Mapping[RequestId, OpenRequest], now: float
    ) -> None:
        """Pull into blocks that the steps launched so far may use, when these have ended."""
        if loads:
            self._fence()
        self.start(loads, requests, now)

    def finish(self, requests: Mapping[RequestId, OpenRequest], report: StepReport, now: float) -> None:
        """Tell the engine of the loads that have ended, and report those that count."""
        for load, pull in self._puller.take_results():
            self._engine.finish_load(load, pull.ok)
            self._report_end(load, pull, requests, report, now)

    def _report_end(
        self, load: KvLoad, pull: Pull, requests: Mapping[RequestId, OpenRequest], report: StepReport, now: float
    ) -> None:
        entry = requests.get(pull.request_id)
        if entry is not None:
            entry.finish_pull(pull, now)
            if not pull.ok:
                text = "KV pull failed, computing the prompt here: %s"
                logger.warning(text, pull.error, extra=about(pull.request_id))
        if entry is not None or pull.ok:  # else cancelled, and its lease may have ended meanwhile: no fault
            report.pulls.append(pull)

    def _open(self, handle: KvHandle, request_id: str = "") -> PeerLease | None:
        try:
            lease = open_handle(handle)
        except MiniInferError as error:
            logger.warning("%s: computing the prompt here", error, extra=about(request_id))
            return None
        self._puller.keep_alive(lease)
        if not self._can_read:
            text = "KV of peers cannot reach the stage on the other host: computing the prompt here"
            logger.warning(text, extra=about(request_id))
            self.abandon(lease)
            return None
        return lease
