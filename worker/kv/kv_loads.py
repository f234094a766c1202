"""KV loads: keep a peer's leases alive, read them into blocks that the engine has reserved, and release them.

The engine process's loop calls `KvLoads` between steps; blocks belong to a load until its result is taken. `KvPuller`
copies in threads. A lease is renewed from the arrival of its handle until it is read or abandoned, and then released.
Failures are only reported: the scheduler then computes the missing KV.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from common.errors import MiniInferError, TransferError
from common.logging import about
from engine.engine import Engine
from engine.request import RequestId
from engine.scheduled_step import KvLoad
from kvstore.handle.handle import PeerLease, open_handle
from kvstore.transports.client import DEFAULT_DEADLINE_SECONDS, KvClient
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.types import LeaseId
from protos import types_pb2 as pb
from worker.engine_process.figures import OpenRequest
from worker.messages import Pull, StepReport

logger = logging.getLogger("engine")
NUM_THREADS = 2  # one can copy while the other waits for a peer
PREFETCH_SECONDS = 5.0  # short: a request may wait for a prefetch, and needs a load afterwards
RENEW_INTERVAL_SECONDS = 1.0


class KvPuller:
    """The puller threads of one engine."""

    def __init__(self, clients: Sequence[KvClient], leases: LeaseClient, on_result: Callable[[], None]) -> None:
        """clients: one for the pool of each rank. on_result: called from a thread when there is a result."""
        self._clients = clients
        self._leases = leases
        self._on_result = on_result
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-pull")
        self._prefetcher = ThreadPoolExecutor(1, thread_name_prefix="kv-prefetch")  # so that loads never wait for it
        self._results: deque[tuple[KvLoad, Pull]] = deque()
        self._kept_alive: dict[LeaseId, PeerLease] = {}  # renewed until their loads end
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.num_open = 0  # loads whose results have not been taken
        threading.Thread(target=self._renew_loop, name="kv-renew", daemon=True).start()

    # -- called by the step loop -----------------------------------------------------------------------------

    def keep_alive(self, lease: PeerLease) -> None:
        """Renew the lease until `load` has read it or `abandon` releases it."""
        with self._lock:
            self._kept_alive[lease.lease_id] = lease

    def load(self, load: KvLoad) -> None:
        """Fill the load's blocks from the lease that is its source, then release the lease."""
        self.num_open += 1
        (self._executor if load.owner else self._prefetcher).submit(self._load, load)

    def abandon(self, lease: PeerLease) -> None:
        """Release a lease that this worker does not need any more."""
        self._executor.submit(self._let_go, lease.lease_id)

    def take_results(self) -> list[tuple[KvLoad, Pull]]:
        """Return the loads that have ended. The `Pull` of a prefetch names no request."""
        results = [self._results.popleft() for _ in range(len(self._results))]
        self.num_open -= len(results)
        return results

    def close(self) -> None:
        """Wait for loads that have begun, and release all leases, which would otherwise last until they expire."""
        self._closed.set()
        for executor in (self._executor, self._prefetcher):
            executor.shutdown(wait=True, cancel_futures=True)
        for lease_id in list(self._kept_alive):
            self._let_go(lease_id)
        for client in self._clients:
            client.close()
        self._leases.close()

    # -- threads ---------------------------------------------------------------------------------------------

    def _load(self, load: KvLoad) -> None:
        assert isinstance(load.source, PeerLease)
        lease_id = load.source.lease_id
        self._results.append((load, self._pull(load, lease_id)))
        self._on_result()
        self._let_go(lease_id)  # otherwise it would be renewed forever

    def _pull(self, load: KvLoad, lease_id: LeaseId) -> Pull:
        """Pull from all ranks. Always returns a result, because the engine waits for one."""
        request_id = load.owner.request_id if load.owner else RequestId("")
        seconds = DEFAULT_DEADLINE_SECONDS if load.owner else PREFETCH_SECONDS
        began = time.monotonic()
        try:
            with self._lock:
                lease = self._kept_alive.get(lease_id)
            if lease is None:
                raise TransferError("the lease was released for another request that had the same handle")
            transports = [client.pull(lease, load.positions, load.block_ids, seconds) for client in self._clients]
            num_bytes = len(load.positions) * sum(client.geometry.block_bytes for client in self._clients)
            return Pull(request_id, True, "", transports[0], num_bytes, time.monotonic() - began)
        except MiniInferError as error:
            return Pull(request_id, False, str(error))
        except Exception:  # a thread's exception would be lost
            logger.exception("KV pull failed", extra=about(request_id))
            return Pull(request_id, False, "a bug")

    def _let_go(self, lease_id: LeaseId) -> None:
        with self._lock:
            lease = self._kept_alive.pop(lease_id, None)
        if lease is None:
            return
        try:
            self._leases.release(lease)
        except MiniInferError as error:
            logger.debug("lease not released, it will expire: %s", error)

    def _renew_loop(self) -> None:
        renewed: dict[LeaseId, float] = {}
        while not self._closed.wait(RENEW_INTERVAL_SECONDS):
            with self._lock:
                leases = list(self._kept_alive.values())
            now = time.monotonic()
            renewed = {lease.lease_id: renewed.get(lease.lease_id, now) for lease in leases}
            for lease in leases:
                if now - renewed[lease.lease_id] < lease.lease_seconds / 3:
                    continue
                renewed[lease.lease_id] = now
                try:
                    self._leases.renew(lease)
                except MiniInferError as error:
                    logger.debug("lease not renewed: %s", error)


class KvLoads:
    """Connects the engine, which reserves blocks for loads, with the puller, which fills them."""

    def __init__(self, engine: Engine, puller: KvPuller, fence: Callable[[], None], can_read: bool = True) -> None:
        """fence: called before blocks are given to loads that must wait for the steps launched so far.

        can_read: whether loads can fill the whole pool; otherwise no handle is accepted.
        """
        self._can_read = can_read
        self._engine = engine
        self._kv = engine.kv
        self._puller = puller
        self._fence = fence

    @property
    def num_open(self) -> int:
        return self._puller.num_open

    def accept(self, handle: pb.KvHandle | None, num_tokens: int, request_id: RequestId) -> PeerLease | None:
        """Keep the handle's lease alive and return it; None, to compute here, unless it covers just `num_tokens`."""
        lease = None if handle is None else self._open(handle, request_id)
        if lease is None:
            return None
        if lease.num_tokens != num_tokens or lease.num_blocks != self._kv.num_blocks_to_load(num_tokens):
            text = "a KV handle does not cover its request: computing the prompt here"
            logger.warning(text, extra=about(request_id))
            self.abandon(lease)
            return None
        return lease

    def abandon(self, source: object | None) -> None:
        """Release the lease, if any, that a request does not need any more."""
        if source is not None:
            assert isinstance(source, PeerLease)
            self._puller.abandon(source)

    def close(self) -> None:
        """Release all leases, because this process ends."""
        self._puller.close()

    def prefetch(self, offer: pb.KvOffer) -> None:
        """Handle a peer's offer of part of a prompt that it is still computing: here, release its lease unread."""
        self.abandon(self._open(offer.kv_handle))

    def start(self, loads: Sequence[KvLoad], requests: Mapping[RequestId, OpenRequest], now: float) -> None:
        """Pull into blocks that a step has reserved and that no step in flight uses."""
        for load in loads:
            entry = None if load.owner is None else requests.get(load.owner.request_id)
            if not load.positions:
                self._skip(load, entry)
                continue
            if entry is not None:
                entry.start_pull(load.num_tokens, now)
            self._puller.load(load)

    def _skip(self, load: KvLoad, entry: OpenRequest | None) -> None:
        """Release the source of a load without blocks to pull. entry: of its request, if that is open."""
        self.abandon(load.source)

    def start_after_steps(
        self, loads: Sequence[KvLoad], requests: Mapping[RequestId, OpenRequest], now: float
    ) -> None:
        """Pull into blocks that steps launched so far may use, after these steps have ended."""
        if loads:
            self._fence()
        self.start(loads, requests, now)

    def finish(self, requests: Mapping[RequestId, OpenRequest], report: StepReport, now: float) -> None:
        """Tell the engine which loads have ended, and report the pulls that count."""
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
        if entry is not None or pull.ok:  # otherwise cancelled, and its lease may have ended: no error
            report.pulls.append(pull)

    def _open(self, handle: pb.KvHandle, request_id: str = "") -> PeerLease | None:
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
