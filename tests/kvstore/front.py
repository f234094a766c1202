"""A worker with one pool and its front's service."""

from __future__ import annotations

from pathlib import Path

from kvstore.handle.handle import PeerLease
from kvstore.layout import PoolGeometry
from tests.kvstore.helpers import GEOMETRY, Front, Owner, Stage


class Worker(Front):
    """A front with its service."""

    def __init__(self, folder: Path, geometry: PoolGeometry = GEOMETRY, stage: Stage | None = None) -> None:
        self.owner = Owner(folder, geometry)
        super().__init__([self.owner], "secret", stage)

    def lease(self, block_ids: list[int], seconds: float = 60.0) -> PeerLease:
        self.adopt(block_ids, seconds)
        return self.owner.peer(block_ids, "lease", self.server.address, shm=False)
