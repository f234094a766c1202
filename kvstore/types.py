"""Names of the things that travel: block ids, block keys, host slots, leases, workers."""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)  # index into one worker's pool
BlockKey = NewType("BlockKey", bytes)  # 32 bytes; equal key means equal KV
HostSlot = NewType("HostSlot", int)  # index into a host-memory tier
LeaseId = NewType("LeaseId", str)
WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", int)  # 64 random bits, drawn when a pool is made
