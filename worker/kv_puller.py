"""Brings KV from peers into this engine's pool, in threads, beside the step loop.

The loop hands over jobs and collects results between steps; blocks belong to a job until its result is taken. A lease
is renewed from the moment its handle arrives until it is read or let go, and released after. What fails is only
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
from engine.request import RequestId
from kvstore.transport.client import KvClient
from kvstore.transport.handle import PeerLease
from kvstore.types import BlockId, LeaseId
from worker.messages import Pull

logger = logging.getLogger(__name__)
NUM_THREADS = 2  # one copies while another waits for a peer
RENEW_INTERVAL_SECONDS = 1.0


class KvPuller:
    """Puller threads of one engine."""

    def __init__(self, clients: Sequence[KvClient], on_result: Callable[[], None]) -> None:
        """clients: one into the pool of each rank. `on_result` is called from a thread when a result is there."""
        self._clients = clients
        self._on_result = on_result
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-pull")
        self._results: deque[Pull] = deque()
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

    def load(
        self, request_id: RequestId, lease: PeerLease, positions: Sequence[int], block_ids: Sequence[BlockId]
    ) -> None:
        """Fill `block_ids[i]` with block `positions[i]` of the lease, then release it."""
        self.num_open += 1
        self._executor.submit(self._load, request_id, lease.lease_id, list(positions), list(block_ids))

    def abandon(self, lease: PeerLease) -> None:
        """Release a lease that nobody here needs any more."""
        self._executor.submit(self._let_go, lease.lease_id)

    def take_results(self) -> list[Pull]:
        results = []
        while self._results:
            results.append(self._results.popleft())
        self.num_open -= len(results)
        return results

    def close(self) -> None:
        self._closed.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
        for client in self._clients:
            client.close()

    # -- threads ---------------------------------------------------------------------------------------------

    def _load(self, request_id: RequestId, lease_id: LeaseId, positions: list[int], block_ids: list[BlockId]) -> None:
        result = Pull(request_id, False, "a bug")
        try:
            with self._lock:
                lease = self._kept_alive.get(lease_id)
            if lease is None:
                raise TransferError("the lease was released for another request that had the same handle")
            pulled = [client.pull(lease, positions, block_ids) for client in self._clients]
            num_bytes, seconds = sum(one.num_bytes for one in pulled), sum(one.seconds for one in pulled)
            result = Pull(request_id, True, "", pulled[0].transport, num_bytes, seconds)
        except MiniInferError as error:
            result = Pull(request_id, False, str(error))
        except Exception:  # a thread's exception would be lost
            logger.exception("KV pull failed")
        finally:
            self._results.append(result)  # whatever happened: the request waits for it
            self._on_result()
            self._let_go(lease_id)  # else it would be renewed forever

    def _let_go(self, lease_id: LeaseId) -> None:
        with self._lock:
            lease = self._kept_alive.pop(lease_id, None)
        if lease is None:
            return
        try:
            self._clients[0].release(lease)
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
                    self._clients[0].renew(lease)
                except MiniInferError as error:
                    logger.debug("lease not renewed: %s", error)
