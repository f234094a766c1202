"""Keys of KV blocks: a chain of SHA-256 over everything that decides what the KV is.

    root = SHA-256(version, fingerprint, adapter, salt)      each field with its length in front
    key  = SHA-256(key of the block before, or root; token ids as little-endian uint32)

Equal key means equal KV: same weights, same adapter, same tokens from position 0 on. The salt separates
tenants. SHA-256, because a key that somebody can forge would read another one's cache. Standard library
only: router and workers both compute keys, and must agree (`HASH_VERSION` is compared in the handshake).
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

from kvstore.types import BlockKey

HASH_VERSION = 1
KEY_BYTES = 32
GROUP_MARK = b"\0kvg"  # begins the keys of groups but the first; another key does with a chance of 2^-32


def root_key(fingerprint: str, adapter: str = "", salt: str = "") -> BlockKey:
    """The parent of every first block. `fingerprint` names weights, config and quantization."""
    digest = hashlib.sha256(struct.pack("<4sI", b"mikv", HASH_VERSION))
    for text in (fingerprint, adapter, salt):
        data = text.encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return BlockKey(digest.digest())


def block_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Key of the block that holds `token_ids` (each below 2^32) and follows `parent`."""
    return BlockKey(hashlib.sha256(parent + _token_bytes(token_ids)).digest())


def block_keys(token_ids: Sequence[int], block_size: int, root: BlockKey) -> list[BlockKey]:
    """Keys of the full blocks of a sequence; a partial last block has none."""
    return extend_keys([], token_ids, block_size, root)


def group_key(key: BlockKey, group: int) -> BlockKey:
    """Key of the block of KV group `group` that holds the tokens for which `key` stands (docs/decisions/0230)."""
    return BlockKey(GROUP_MARK + bytes([group]) + key[len(GROUP_MARK) + 1 :]) if group else key


def extend_keys(keys: list[BlockKey], token_ids: Sequence[int], block_size: int, root: BlockKey) -> list[BlockKey]:
    """Append to `keys` those of the full blocks of `token_ids` that it lacks; return `keys`.

    `keys` holds the first blocks' keys of the same sequence. Costs one hash per new block.
    """
    num_full = len(token_ids) // block_size
    if num_full <= len(keys):
        return keys
    first = len(keys)
    data = _token_bytes(token_ids[first * block_size : num_full * block_size])
    width = 4 * block_size
    parent = keys[-1] if keys else root
    for start in range(0, len(data), width):
        parent = BlockKey(hashlib.sha256(parent + data[start : start + width]).digest())
        keys.append(parent)
    return keys


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if words.itemsize != 4:  # C leaves the width open; every platform we know has 4
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
