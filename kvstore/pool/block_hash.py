"""Keys of KV blocks: a chain of SHA-256 hashes over everything that determines the KV.

    root = SHA-256(version, fingerprint, adapter, salt)      each field preceded by its length
    key  = SHA-256(key of the previous block, or root; token ids as little-endian uint32)

Equal keys mean equal KV: the same weights, adapter, and tokens from position 0 on. The salt separates tenants.
The hash is cryptographic because a forged key would give access to another tenant's cache. Router and workers both
compute keys, and must agree (`HASH_VERSION` is compared in the handshake).
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

from common.token_ids import ID_BYTES
from kvstore.types import BlockKey

HASH_VERSION = 3  # version of keys, and of the protocol between routers and workers
GROUP_MARK = b"\0kvg"  # prefix of keys of all groups but the first; other keys have it with probability 2^-32


@lru_cache(maxsize=1024)  # there are few models, adapters and tenants, and many requests
def root_key(fingerprint: str, adapter: str = "", salt: str = "") -> BlockKey:
    """Return the parent key of every first block. `fingerprint` identifies weights, config and quantization."""
    digest = hashlib.sha256(struct.pack("<4sI", b"mikv", HASH_VERSION))
    for text in (fingerprint, adapter, salt):
        data = text.encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return BlockKey(digest.digest())


def block_keys(parent: BlockKey, packed_ids: bytes, block_size: int) -> list[BlockKey]:
    """Return the keys of the full blocks of `packed_ids` (see `common.token_ids`) after the block or root `parent`.

    A partial last block has no key.
    """
    keys, width = [], ID_BYTES * block_size
    for start in range(0, len(packed_ids) - width + 1, width):
        parent = BlockKey(hashlib.sha256(parent + packed_ids[start : start + width]).digest())
        keys.append(parent)
    return keys


def group_key(key: BlockKey, group: int) -> BlockKey:
    """Return the key of KV group `group`'s block for the same tokens as `key`, which is the first group's."""
    return BlockKey(GROUP_MARK + bytes([group]) + key[len(GROUP_MARK) + 1 :]) if group else key
