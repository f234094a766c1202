"""Blocks of peers on the same host into GPU memory: the GPU copies them from the peer's own memory.

A peer whose blocks lie in GPU memory has copied them to pinned rows when it was asked to; here the rows are pinned as
well, so both copies run at the bus's speed. Digests are computed on the GPU, of what has arrived.
"""

from __future__ import annotations

import logging
import threading

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.gpu.pinning import pin
from kvstore.handle.handle import PeerShard
from kvstore.transports.host_pull import BlockPull, Blocks
from kvstore.transports.lease_client import LeaseClient
from kvstore.transports.shm.reader import PeerMappings, rows_of_lease
from worker.kv.device_pool import DevicePool
from worker.kv.pinned_staging import StagedTransport

logger = logging.getLogger("engine")


class MappedRowsTransport:
    """`shm` into a pool in GPU memory."""

    name = "shm"

    def __init__(self, staged: StagedTransport, leases: LeaseClient, device_pool: DevicePool) -> None:
        """staged: `shm` through rows of this worker, for shards that are divided otherwise than ours."""
        self._staged = staged
        self._leases = leases
        self._device_pool = device_pool
        self._mappings = PeerMappings(self._readable)

    def offered_by(self, shard: PeerShard) -> bool:
        return self._staged.offered_by(shard)

    def open(self, shard: PeerShard) -> None:
        """See Transport. The pull maps the peer's memory, because only it knows whether that is read from here."""

    def pull(self, pull: BlockPull) -> list[list[int]]:
        part, *others = pull.parts
        if others or part.copy is not None:
            return self._staged.pull(pull)
        peer = self._mappings.of(part.shard)
        rows = rows_of_lease(part.shard, pull.positions, len(peer.blocks), self._leases, pull.seconds_left)
        self._device_pool.copy_in(peer.prepared, rows, pull.local_block_ids)
        return [self._device_pool.digests(pull.local_block_ids)]

    def close(self) -> None:
        self._mappings.clear()
        self._staged.close()

    def _readable(self, shard: PeerShard, blocks: Blocks) -> Tensor:
        """The peer's memory as a tensor, which is being pinned: until then copies go through the driver's buffers."""
        memory = torch.from_numpy(np.asarray(_Readable(blocks)))
        device = self._device_pool.device
        if device.type == "cuda" and shard.address.needs_staging:  # a pool of a CPU may be too large to be pinned
            threading.Thread(target=_pin, args=(memory, device), daemon=True).start()
        return memory


class _Readable:
    """Read-only memory that says it is writable: torch knows no tensors that are not, and warns."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.__array_interface__ = {**blocks.__array_interface__, "data": (blocks.ctypes.data, False)}


def _pin(memory: Tensor, device: torch.device) -> None:
    """For a thread of its own: it takes long, and CUDA keeps a thread's last failure for its next call."""
    try:
        with torch.cuda.device(device):
            pin(memory, is_read_only=True)
    except ConfigError:
        logger.info("the driver does not pin a peer's memory: its KV is copied through the driver's buffers")
