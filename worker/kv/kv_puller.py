"""Brings KV from peers into this engine's pool, in threads, beside the step loop.

The loop hands over loads and collects results between steps; blocks belong to a load until its result is taken. A
lease is renewed from the moment its handle arrives until it is read or let go, and released after. What fails is only
reported: the scheduler then computes what is missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from common.errors import MiniInferError, TransferError
from common.logging import about
from engine.request import RequestId
from engine.scheduled_step import KvLoad
from kvstore.handle.handle import PeerLease
from kvstore.transports.client import DEFAULT_DEADLINE_SECONDS, KvClient
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.types import LeaseId
from worker.messages import Pull

logger = logging.getLogger(__name__)
NUM_THREADS = 2  # one copies while another waits for a peer
PREFETCH_SECONDS = 5.0  # a request may wait for the end of a prefetch, and then needs a load
RENEW_INTERVAL_SECONDS = 1.0


class KvPuller:
    """Puller threads of one engine."""

    def __init__(self, clients: Sequence[KvClient], leases: LeaseClient, on_result: Callable[[], None]) -> None:
        """clients: one into the pool of each rank. `on_result` is called from a thread when a result is there."""
        self._clients = clients
        self._leases = leases
        self._on_result = on_result
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-pull")
        self._prefetcher = ThreadPoolExecutor(1, thread_name_prefix="kv-prefetch")  # loads do not queue behind it
        self._results: deque[tuple[KvLoad, Pull]] = deque()
        self._kept_alive: dict[LeaseId, PeerLease] = {}  # their loads have not ended
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.num_open = 0  # loads whose results have not been taken
        threading.Thread(target=self._renew_loop, name="kv-renew", daemon=True).start()

    # -- called by the step loop -----------------------------------------------------------------------------

    def keep_alive(self, lease: PeerLease) -> None:
        """Renew the lease until `load` has read it or `abandon` lets it go."""
        with self._lock:
            self._kept_alive[lease.lease_id] = lease

    def load(self, load: KvLoad) -> None:
        """Fill the load's blocks from the lease that is its source, then release it."""
        self.num_open += 1
        (self._executor if load.owner else self._prefetcher).submit(self._load, load)

    def abandon(self, lease: PeerLease) -> None:
        """Release a lease that nobody here needs any more."""
        self._executor.submit(self._let_go, lease.lease_id)

    def take_results(self) -> list[tuple[KvLoad, Pull]]:
        """Loads that have ended. The `Pull` of a prefetch names no request."""
        taken = [self._results.popleft() for _ in range(len(self._results))]
        self.num_open -= len(taken)
        return taken

    def close(self) -> None:
        """Let loads under way end, and all leases go: their owners would keep them until they expire."""
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
        self._let_go(lease_id)  # else it would be renewed forever

    def _pull(self, load: KvLoad, lease_id: LeaseId) -> Pull:
        """Pull from all ranks; whatever happens, there is a result: somebody waits for it."""
        request_id = load.owner.request_id if load.owner else RequestId("")
        seconds = DEFAULT_DEADLINE_SECONDS if load.owner else PREFETCH_SECONDS
        try:
            with self._lock:
                lease = self._kept_alive.get(lease_id)
            if lease is None:
                raise TransferError("the lease was released for another request that had the same handle")
            pulled = [client.pull(lease, load.positions, load.block_ids, seconds) for client in self._clients]
            num_bytes, taken = sum(one.num_bytes for one in pulled), sum(one.seconds for one in pulled)
            return Pull(request_id, True, "", pulled[0].transport, num_bytes, taken)
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
