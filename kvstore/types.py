"""Names of the things that travel: block ids, block keys, host slots, leases, workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)  # index into one worker's pool
BlockKey = NewType("BlockKey", bytes)  # 32 bytes; equal key means equal KV
HostSlot = NewType("HostSlot", int)  # index into a host-memory tier
LeaseId = NewType("LeaseId", str)
WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)  # 64 random bits, drawn when a pool is made


@dataclass(frozen=True, slots=True)
class PeerPool:
    """A lease of another worker and where its blocks can be read: the fields of a KvHandle."""

    worker_id: WorkerId
    epoch: Epoch
    kv_address: str  # host:port of the KvTransfer service; empty: none
    shm_socket: str  # Unix socket that hands out the pool's descriptor; empty: none
    lease_id: LeaseId
    block_ids: tuple[BlockId, ...]
    digests: tuple[int, ...]  # one per block
    num_tokens: int  # whose KV the blocks hold
    lease_seconds: float
    cuda_socket: str = ""  # Unix socket that hands out the descriptor of the pool in GPU memory; empty: none
    needs_staging: bool = False  # the blocks lie in GPU memory: shm reads them from rows that the owner names
