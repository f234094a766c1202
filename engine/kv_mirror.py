"""Dense copies of the KV of decoding sequences, so that a CPU's decode steps read it without gathering blocks.

The pool stays the truth: a row of the mirror is filled from it when a sequence starts to decode, gets each new
token's K and V as the pool does, and is dropped when the sequence is not in a step or no longer continues what the
row holds. Sequences of similar length share an arena, whose rows one batched product can read.

Knows requests by their block ids and lengths only. It never holds more than its budget; a sequence that finds no
room simply has no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import Request
from kernels.cpu_attention import mask_source
from kvstore.types import BlockId

MIN_CAPACITY = 128


def capacity_for(num_tokens: int) -> int:
    """Row length of the arena for sequences of `num_tokens`: powers of two and the steps half-way."""
    capacity = MIN_CAPACITY
    while capacity < num_tokens:
        if capacity * 3 // 2 >= num_tokens:
            return capacity * 3 // 2
        capacity *= 2
    return capacity


class Arena:
    """Rows of one capacity: kv (num_layers, 2, num_rows, kv_heads, capacity, head_dim). Rows may be vacant."""

    def __init__(self, pool: Tensor, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[MirrorRow | None] = []
        _, num_layers, _, kv_heads, _, head_dim = pool.shape
        self.kv = torch.zeros(num_layers, 2, 1, kv_heads, capacity, head_dim, dtype=pool.dtype)
        self.mask_source = mask_source(capacity, pool.dtype)
        self._views: tuple[int, int, list[tuple[Tensor, Tensor, Tensor]]] = (0, 0, [])

    @property
    def num_slots(self) -> int:
        return self.kv.shape[2]

    @property
    def extent(self) -> int:
        """Rows up to the last occupied one."""
        return len(self.rows)

    def grow(self) -> None:
        """Double the rows; content moves along."""
        wider = torch.zeros(*self.kv.shape[:2], 2 * self.num_slots, *self.kv.shape[3:], dtype=self.kv.dtype)
        wider[:, :, : self.num_slots] = self.kv
        self.kv = wider
        self._views = (0, 0, [])

    def place(self, row: MirrorRow) -> None:
        """Put `row` into the first vacant place. There must be one."""
        index = self.rows.index(None) if None in self.rows else len(self.rows)
        assert index < self.num_slots
        if index == len(self.rows):
            self.rows.append(row)
        else:
            self.rows[index] = row
        row.arena, row.index = self, index

    def vacate(self, row: MirrorRow) -> None:
        self.rows[row.index] = None
        self._trim()

    def compact(self) -> None:
        """Move last rows into vacant places while more than a quarter of the extent is vacant."""
        while self.rows.count(None) * 4 > max(len(self.rows), 4):
            row = self.rows.pop()
            assert row is not None  # `_trim` keeps the last place occupied
            old = row.index
            self.place(row)
            self.kv[:, :, row.index] = self.kv[:, :, old]
            self._trim()

    def views(self, num_rows: int, num_keys: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per layer: (num_slots, capacity, 2, kv_heads, head_dim) to write, keys and values to read as
        (num_rows, kv_heads, num_keys, head_dim).

        Kept while neither number changes, which is for dozens of steps.
        """
        if self._views[:2] != (num_rows, num_keys):
            views = []
            for layer in self.kv:
                keys, values = layer[:, :num_rows, :, :num_keys]
                views.append((layer.permute(1, 3, 0, 2, 4), keys, values))
            self._views = (num_rows, num_keys, views)
        return self._views[2]

    def _trim(self) -> None:
        while self.rows and self.rows[-1] is None:
            self.rows.pop()


@dataclass(slots=True, eq=False)
class MirrorRow:
    """One sequence: its first `length` tokens' KV, as the blocks `block_ids` hold it."""

    request: Request
    block_ids: list[BlockId]
    length: int
    arena: Arena
    index: int


class KVMirror:
    """The rows of all decoding sequences."""

    def __init__(self, pool: Tensor, budget_tokens: int) -> None:
        self._pool = pool
        self._block_size = pool.shape[4]
        self._budget_tokens = budget_tokens
        self._arenas: dict[int, Arena] = {}
        self._rows: dict[str, MirrorRow] = {}

    def sync(self, requests: Sequence[Request], starts: Sequence[int]) -> list[MirrorRow | None]:
        """Rows that hold each request's tokens [0, start) and have room for one more; None without room.

        Drops every other row: its request is not part of this decode step.
        """
        kept = {
            request.request_id
            for request, start in zip(requests, starts, strict=True)
            if self._continues(request, start)
        }
        for request_id in [name for name in self._rows if name not in kept]:
            self._drop(self._rows.pop(request_id))
        for arena in list(self._arenas.values()):
            if arena.extent == 0:
                del self._arenas[arena.capacity]
            else:
                arena.compact()
        found: list[MirrorRow | None] = []
        for request, start in zip(requests, starts, strict=True):
            row = self._rows.get(request.request_id) or self._make(request, start)
            if row is not None:
                row.length = start + 1
                row.block_ids = request.block_ids[: start // self._block_size + 1]
            found.append(row)
        return found

    def _continues(self, request: Request, start: int) -> bool:
        row = self._rows.get(request.request_id)
        if row is None or row.request is not request or start > row.length or start >= row.arena.capacity:
            return False
        num_blocks = -(-start // self._block_size)
        return row.block_ids[:num_blocks] == request.block_ids[:num_blocks]

    def _make(self, request: Request, start: int) -> MirrorRow | None:
        """A new row, filled from the pool; None when the budget is used up."""
        arena = self._arena_with_room(capacity_for(start + 1))
        if arena is None:
            return None
        row = MirrorRow(request, [], start, arena, -1)
        arena.place(row)
        self._fill(row, request.block_ids[: -(-start // self._block_size)], start)
        self._rows[request.request_id] = row
        return row

    def _arena_with_room(self, capacity: int) -> Arena | None:
        arena = self._arenas.get(capacity)
        if arena is not None and (None in arena.rows or arena.extent < arena.num_slots):
            return arena
        used = sum(other.capacity * other.num_slots for other in self._arenas.values())
        needed = capacity if arena is None else capacity * arena.num_slots
        if used + needed > self._budget_tokens:
            return None
        if arena is None:
            arena = self._arenas[capacity] = Arena(self._pool, capacity)
        else:
            arena.grow()
        return arena

    def _fill(self, row: MirrorRow, block_ids: list[BlockId], length: int) -> None:
        """Copy from the pool, and clear the rest: what an earlier sequence left there could be NaN."""
        target = row.arena.kv[:, :, row.index]  # (layers, 2, kv_heads, capacity, head_dim)
        for place, block_id in enumerate(block_ids):
            first = place * self._block_size
            count = min(self._block_size, length - first)
            target[:, :, :, first : first + count] = self._pool[block_id, :, :, :, :count]
        target[:, :, :, length:] = 0

    def _drop(self, row: MirrorRow) -> None:
        row.arena.vacate(row)


def padded_rows(num_rows: int) -> int:
    """Number of rows to compute: few distinct values, at most a quarter more than asked for."""
    step = 1 if num_rows <= 8 else 2 if num_rows <= 16 else 4 if num_rows <= 32 else 8
    return -(-num_rows // step) * step
