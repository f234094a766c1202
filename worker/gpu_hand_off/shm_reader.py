"""Reads of peers' host memory into a pool in a device's memory."""

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
    on_device: Tensor  # the same memory, as the device reads it


class DevicePeerMappings(PeerMappings):
    """Memory of peers that the device is to read, too."""

    def __init__(self, device: DevicePool) -> None:
        super().__init__()
        self._device = device

    def map(self, shard: PeerShard) -> DevicePeerMemory:
        memory = super().map(shard)
        # A peer's pool on a CPU may be too large to be pinned.
        on_device = self._device.readable(memory.blocks, pinned=shard.address.needs_staging)
        return DevicePeerMemory(memory.info, memory.blocks, on_device)


class DeviceShmReader:
    """The device copies blocks from the peer's memory by itself.

    A peer whose blocks lie in GPU memory, too, has copied them to pinned rows when it was asked to; here the rows are
    pinned as well, so both copies run at the bus's speed. Digests are computed on the device, of what has arrived.
    """

    def __init__(self, device: DevicePool, through_host: Reader, leases: LeaseClient) -> None:
        """through_host: for shards that are divided otherwise than ours."""
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
