"""Keys of KV blocks: a chain of SHA-256 over everything that decides what the KV is.

    root = SHA-256(version, fingerprint, adapter, salt)      each field with its length in front
    key  = SHA-256(key of the block before, or root; token ids as little-endian uint32)

Equal key means equal KV: same weights, same adapter, same tokens from position 0 on. The salt separates
tenants. SHA-256, because a key that somebody can forge would read another one's cache. Router and workers both
compute keys, and must agree (`HASH_VERSION` is compared in the handshake).
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

from common.token_ids import ID_BYTES
from kvstore.types import BlockKey

HASH_VERSION = 3  # of keys, and of what routers and workers send each other
GROUP_MARK = b"\0kvg"  # begins the keys of groups but the first; another key does with a chance of 2^-32


@lru_cache(maxsize=1024)  # models, adapters and tenants are few, requests many
def root_key(fingerprint: str, adapter: str = "", salt: str = "") -> BlockKey:
    """The parent of every first block. `fingerprint` names weights, config and quantization."""
    digest = hashlib.sha256(struct.pack("<4sI", b"mikv", HASH_VERSION))
    for text in (fingerprint, adapter, salt):
        data = text.encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return BlockKey(digest.digest())


def block_keys(parent: BlockKey, packed_ids: bytes, block_size: int) -> list[BlockKey]:
    """Keys of the full blocks of `packed_ids` (see `common.token_ids`), which follow the block or root `parent`.

    A partial last block has none.
    """
    keys, width = [], ID_BYTES * block_size
    for start in range(0, len(packed_ids) - width + 1, width):
        parent = BlockKey(hashlib.sha256(parent + packed_ids[start : start + width]).digest())
        keys.append(parent)
    return keys


def group_key(key: BlockKey, group: int) -> BlockKey:
    """Key of the block of KV group `group` that holds the tokens for which `key` stands."""
    return BlockKey(GROUP_MARK + bytes([group]) + key[len(GROUP_MARK) + 1 :]) if group else key
