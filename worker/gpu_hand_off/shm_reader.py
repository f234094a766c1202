"""Reads peers' host memory into a pool in GPU memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvstore.handle.handle import PeerShard
from kvstore.transports.kv_transfer import LeaseClient
from kvstore.transports.shm import PeerMappings, PeerMemory, rows_of_lease
from kvstore.transports.transport import BlockPull, Reader
from worker.gpu_hand_off.device_pool import DevicePool


@dataclass(frozen=True, slots=True)
class DevicePeerMemory(PeerMemory):
    on_device: Tensor  # the same memory, for copies by the device


class DevicePeerMappings(PeerMappings):
    """Memory of peers that the device copies from."""

    def __init__(self, device: DevicePool) -> None:
        super().__init__()
        self._device = device

    def map(self, shard: PeerShard) -> DevicePeerMemory:
        memory = super().map(shard)
        # A peer's CPU pool may be too large to be pinned.
        on_device = self._device.readable(memory.blocks, pinned=shard.address.needs_staging)
        return DevicePeerMemory(memory.info, memory.blocks, on_device)


class DeviceShmReader:
    """Lets the device copy blocks directly from the peer's memory.

    A peer with blocks in GPU memory has copied them to pinned rows on request. The rows are pinned here as well, so
    both copies run at the bus's speed. The device computes the digests of what has arrived.
    """

    def __init__(self, device: DevicePool, through_host: Reader, leases: LeaseClient) -> None:
        """through_host: the reader for shards that are divided differently from ours."""
        self._device = device
        self._through_host = through_host
        self._leases = leases
        self._mappings = DevicePeerMappings(device)

    def pull(self, pull: BlockPull) -> list[list[int]]:
        part, *others = pull.parts
        if others or part.copy is not None:
            return self._through_host.pull(pull)
        peer = self._mappings.of(part.shard)
        assert isinstance(peer, DevicePeerMemory)
        rows = rows_of_lease(part.shard, pull.positions, len(peer.blocks), self._leases, pull.seconds_left)
        self._device.copy_in(peer.on_device, rows, pull.local_block_ids)
        return [self._device.digests(pull.local_block_ids)]

    def close(self) -> None:
        self._mappings.clear()
        self._through_host.close()
