"""Prefixes of requests: the keys of their blocks, and the pool's blocks with these keys."""

from __future__ import annotations

from common.token_ids import pack_ids
from engine.request import Request
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.pool.block_pool import BlockPool
from kvstore.types import BlockId, BlockKey

MAX_ROOTS = 4096


class Prefixes:
    """Looks up prefixes. Changes only the requests' `block_keys`."""

    def __init__(self, pool: BlockPool, block_size: int, fingerprint: str) -> None:
        self._pool = pool
        self._block_size = block_size
        self._fingerprint = fingerprint
        self._roots: dict[tuple[str, str], BlockKey] = {}  # by adapter and salt

    def extend_keys(self, request: Request) -> None:
        """Compute the keys of all full blocks of known tokens."""
        keys, size = request.block_keys, self._block_size
        num_full = request.num_known_tokens // size
        if len(keys) >= num_full:
            return
        parent = keys[-1] if keys else self._root(request.adapter, request.cache_salt)
        keys += block_keys(parent, pack_ids(request.token_ids(len(keys) * size, num_full * size)), size)

    def announce_adapter(self, adapter: str, is_there: bool) -> None:
        """Tell routers, by the root key of its blocks, that the adapter is in memory here, or no longer."""
        self._pool.announce(self._root(adapter, ""), is_there)

    def _root(self, adapter: str, salt: str) -> BlockKey:
        root = self._roots.get((adapter, salt))
        if root is None:
            if len(self._roots) > MAX_ROOTS:  # salts come from clients: bounded
                self._roots.clear()
            root = self._roots[adapter, salt] = root_key(self._fingerprint, adapter, salt)
        return root

    def cached_table(self, request: Request, max_tokens: int) -> list[BlockId]:
        """Return the block table of the longest cached prefix of at most `max_tokens`."""
        if not self._pool.enable_prefix_cache:
            return []
        self.extend_keys(request)
        return self._look_up(request.block_keys[: max_tokens // self._block_size])

    def _look_up(self, keys: list[BlockKey]) -> list[BlockId]:
        return self._pool.lookup(keys)
