"""Names of the things that travel: block ids, block keys, host slots, leases, workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)  # index into one worker's pool
BlockKey = NewType("BlockKey", bytes)  # 32 bytes; equal key means equal KV
HostSlot = NewType("HostSlot", int)  # index into a host-memory tier
LeaseId = NewType("LeaseId", str)
WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)  # 64 random bits, drawn when a pool is made

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Shape of a pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]` of `dtype`.

    One block of all layers is one contiguous piece of `block_bytes`. `fingerprint` names weights, config and
    quantization; KV may move only between pools that agree in all but `num_blocks`.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    fingerprint: str

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


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
