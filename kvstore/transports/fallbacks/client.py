"""A client that tries transports in order, and logs which one a peer is read by."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from common.errors import MiniInferError, TransferError
from kvstore.handle.handle import PeerShard
from kvstore.layout import PoolGeometry
from kvstore.transports.client import KvClient
from kvstore.transports.transport import BlockPull, Reader
from kvstore.types import Epoch, WorkerId

logger = logging.getLogger(__name__)
FALLBACK_SECONDS = 5.0  # after so long the peer itself has stopped, and no other transport will work


class FallbackClient(KvClient):
    """Reads with the first transport that works."""

    def __init__(self, geometry: PoolGeometry, readers: Mapping[str, Reader]) -> None:
        super().__init__(geometry, readers)
        self._chosen: dict[tuple[WorkerId, Epoch], str] = {}  # for the log: one line per change
        self._lock = threading.Lock()

    def read(self, pull: BlockPull) -> tuple[str, list[list[int]]]:
        shard = pull.parts[0].shard
        failures: list[str] = []
        began = time.monotonic()
        for name, reader in self.in_common(pull):
            if failures and time.monotonic() - began > FALLBACK_SECONDS:
                break
            try:
                digests = reader.pull(pull)
            except MiniInferError as error:
                failures.append(f"{name}: {error}")
                continue
            self._note_choice(shard, name, failures)
            return name, digests
        raise TransferError(f"worker {shard.worker_id} cannot be read ({'; '.join(failures)})")

    def _note_choice(self, peer: PeerShard, name: str, failures: list[str]) -> None:
        with self._lock:
            known = self._chosen.get((peer.worker_id, peer.epoch))
            if known == name:
                return
            if len(self._chosen) >= 1024:
                self._chosen.clear()
            self._chosen[peer.worker_id, peer.epoch] = name
        reason = f" ({'; '.join(failures)})" if failures else ""
        logger.info("KV of worker %s is read by %s%s", peer.worker_id, name, reason)
