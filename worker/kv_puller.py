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
from dataclasses import dataclass
from typing import Any

from common.errors import MiniInferError, TransferError
from engine.request import RequestId
from kvstore.transport.client import KvClient, peer_from_handle
from kvstore.types import BlockId, PeerPool
from protos import types_pb2 as pb

logger = logging.getLogger(__name__)
NUM_THREADS = 2  # one copies while another waits for a peer
RENEW_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How one job ended. error: why it failed."""

    request_id: RequestId
    ok: bool
    error: str = ""
    transport: str = ""
    num_bytes: int = 0
    seconds: float = 0.0


class KvPuller:
    """One per engine. `handle`s are the fields of a KvHandle; a lease id names one here too."""

    def __init__(self, client: KvClient, on_result: Callable[[], None]) -> None:
        """`on_result` is called from a thread when a result is there."""
        self._client = client
        self._on_result = on_result
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-pull")
        self._results: deque[LoadResult] = deque()
        self._kept_alive: dict[str, PeerPool] = {}  # lease id -> peer; its loads have not ended
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.num_open = 0  # loads whose results have not been taken
        threading.Thread(target=self._renew_loop, name="kv-renew", daemon=True).start()

    # -- called by the step loop -----------------------------------------------------------------------------

    def keep_alive(self, handle: dict[str, Any]) -> None:
        """Renew the handle's lease until `load` has read it or `abandon` lets it go. Raises TransferError."""
        peer = peer_from_handle(pb.KvHandle(**handle))
        with self._lock:
            self._kept_alive[peer.lease_id] = peer

    def load(
        self, request_id: RequestId, handle: dict[str, Any], positions: Sequence[int], block_ids: Sequence[BlockId]
    ) -> None:
        """Fill `block_ids[i]` with block `positions[i]` of the lease, then release it."""
        self.num_open += 1
        self._executor.submit(self._load, request_id, handle["lease_id"], list(positions), list(block_ids))

    def abandon(self, handle: dict[str, Any]) -> None:
        """Release a lease that nobody here needs any more."""
        self._executor.submit(self._let_go, handle["lease_id"])

    def take_results(self) -> list[LoadResult]:
        results = []
        while self._results:
            results.append(self._results.popleft())
        self.num_open -= len(results)
        return results

    def close(self) -> None:
        self._closed.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    # -- threads ---------------------------------------------------------------------------------------------

    def _load(self, request_id: RequestId, lease_id: str, positions: list[int], block_ids: list[BlockId]) -> None:
        result = LoadResult(request_id, False, "a bug")
        try:
            with self._lock:
                peer = self._kept_alive.get(lease_id)
            if peer is None:
                raise TransferError("the lease was released for another request that had the same handle")
            pulled = self._client.pull(peer, positions, block_ids)
            result = LoadResult(request_id, True, "", pulled.transport, pulled.num_bytes, pulled.seconds)
        except MiniInferError as error:
            result = LoadResult(request_id, False, str(error))
        except Exception:  # nobody else looks at a thread's exception
            logger.exception("KV pull failed")
        finally:
            self._results.append(result)  # whatever happened: the request waits for it
            self._on_result()
            self._let_go(lease_id)  # else it would be renewed for ever

    def _let_go(self, lease_id: str) -> None:
        with self._lock:
            peer = self._kept_alive.pop(lease_id, None)
        if peer is None:
            return
        try:
            self._client.release(peer)
        except MiniInferError as error:
            logger.debug("lease not released, it will expire: %s", error)

    def _renew_loop(self) -> None:
        renewed: dict[str, float] = {}
        while not self._closed.wait(RENEW_INTERVAL_SECONDS):
            with self._lock:
                peers = list(self._kept_alive.values())
            now = time.monotonic()
            renewed = {peer.lease_id: renewed.get(peer.lease_id, now) for peer in peers}
            for peer in peers:
                if now - renewed[peer.lease_id] < peer.lease_seconds / 3:
                    continue
                renewed[peer.lease_id] = now
                try:
                    self._client.renew(peer, peer.lease_seconds)
                except MiniInferError as error:
                    logger.debug("lease not renewed: %s", error)
