"""Dense copies of the KV of decoding sequences, so that a CPU's decode steps read it without gathering blocks.

The pool stays the truth: a row of the mirror is filled from it when a sequence starts to decode, gets each new
token's K and V as the pool does, and is dropped when the sequence is not in a step or no longer continues what the
row holds. Sequences of similar length share an arena, whose rows one call of `decode_attention` can read; keys lie
there with their dimensions as rows, as that function wants them.

Knows requests by their block ids and lengths only. It never keeps more than its budget from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request_states import RequestState
from kernels.cpu_attention import KVRows, mask_source
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


@dataclass(slots=True)
class LayerViews:
    """One layer of an arena: to write at `ArenaRows.places_of`, and to read as `decode_attention` does."""

    flat: Tensor  # keys, then values
    keys: Tensor  # (num_slots * kv_heads * head_dim, capacity)
    values: Tensor  # (num_slots * kv_heads * capacity, head_dim)


@dataclass(slots=True)
class ArenaRows:
    """Some rows of an arena: what to read of them, and where a token's K and V go."""

    to_read: KVRows
    first_places: Tensor  # (n, 2, kv_heads, head_dim) in `LayerViews.flat`, of each row's first token
    steps: Tensor  # (2, 1, 1) to the next token's

    def places_of(self, positions: Tensor) -> Tensor:
        """positions (n,), one in each row -> (n, 2, kv_heads, head_dim)."""
        return torch.addcmul(self.first_places, positions[:, None, None, None], self.steps)


class Arena:
    """Rows of one capacity. Rows may be vacant.

    keys: (num_layers, num_slots, kv_heads, head_dim, capacity); values: (.., capacity, head_dim). Both lie in one
    tensor per layer, so that one operation writes both.
    """

    def __init__(self, pool: Tensor, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[MirrorRow | None] = [None]  # one for each slot
        _, num_layers, _, kv_heads, _, head_dim = pool.shape
        self._allocate(num_layers, kv_heads, head_dim, pool.dtype)
        self.mask_source = mask_source(capacity, pool.dtype)
        self._last_rows: tuple[list[int], int, ArenaRows] | None = None

    @property
    def num_slots(self) -> int:
        return len(self.rows)

    def grow(self) -> None:
        """Double the rows; content moves along."""
        keys, values, old_slots = self.keys, self.values, self.num_slots
        self.rows += [None] * old_slots
        self._allocate(keys.shape[0], keys.shape[2], keys.shape[3], keys.dtype)
        self.keys[:, :old_slots], self.values[:, :old_slots] = keys, values
        self._last_rows = None

    def place(self, row: MirrorRow) -> None:
        """Put `row` into the first vacant place. There must be one."""
        row.arena, row.index = self, self.rows.index(None)
        self.rows[row.index] = row

    def some_rows(self, rows: list[int], num_keys: int, num_heads: int) -> ArenaRows:
        """To read the first `num_keys` tokens of `rows` and to write to any.

        Kept while neither changes, which is for 16 steps when sequences neither come nor go.
        """
        if self._last_rows is None or self._last_rows[:2] != (rows, num_keys):
            kv_heads, head_dim, capacity = self.keys.shape[2:]
            to_read = KVRows.of(rows, num_heads, kv_heads, head_dim, capacity, num_keys)
            heads = torch.tensor(rows)[:, None] * kv_heads + torch.arange(kv_heads)  # (n, kv_heads)
            dims = torch.arange(head_dim)
            starts = heads[:, :, None] * head_dim * capacity
            first_places = torch.stack([starts + dims * capacity, self.values[0].numel() + starts + dims], dim=1)
            steps = torch.tensor([1, head_dim])[:, None, None]
            self._last_rows = (rows, num_keys, ArenaRows(to_read, first_places, steps))
        return self._last_rows[2]

    def _allocate(self, num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Zeros for all slots."""
        num_slots, capacity = self.num_slots, self.capacity
        kv = torch.zeros(num_layers, 2, num_slots * kv_heads * head_dim * capacity, dtype=dtype)
        self.keys = kv[:, 0].view(num_layers, num_slots, kv_heads, head_dim, capacity)
        self.values = kv[:, 1].view(num_layers, num_slots, kv_heads, capacity, head_dim)
        self.layers = [
            LayerViews(layer.view(-1), layer[0].view(-1, capacity), layer[1].view(-1, head_dim)) for layer in kv
        ]


@dataclass(slots=True, eq=False)
class MirrorRow:
    """One sequence: its first `length` tokens' KV, as the blocks `block_ids` hold it."""

    request: RequestState
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

    def sync(self, requests: Sequence[RequestState], starts: Sequence[int], stops: Sequence[int]) -> list[MirrorRow]:
        """Rows that hold each request's tokens [0, start) and have room up to `stop`.

        A row that the budget has no room for is filled for this step alone: slow, and with the same results. Drops
        every other row: its request is not part of this decode step. A row may go on before where the last step
        ended, which takes back what that wrote.
        """
        kept = {
            request.request_id
            for request, start, stop in zip(requests, starts, stops, strict=True)
            if self._continues(request, start, stop)
        }
        for request_id in [name for name in self._rows if name not in kept]:
            self._drop(self._rows.pop(request_id))
        found: list[MirrorRow] = []
        for request, start, stop in zip(requests, starts, stops, strict=True):
            row = self._rows.get(request.request_id) or self._make(request, start, stop)
            row.length = stop
            row.block_ids = request.block_ids[: -(-stop // self._block_size)]
            found.append(row)
        return found

    def _continues(self, request: RequestState, start: int, stop: int) -> bool:
        row = self._rows.get(request.request_id)
        if row is None or row.request is not request or start > row.length or stop > row.arena.capacity:
            return False
        num_blocks = -(-start // self._block_size)
        return row.block_ids[:num_blocks] == request.block_ids[:num_blocks]

    def _make(self, request: RequestState, start: int, stop: int) -> MirrorRow:
        """A new row, filled from the pool; in an arena that nothing keeps when the budget is used up."""
        capacity = capacity_for(stop)
        arena = self._arena_with_room(capacity)
        row = MirrorRow(request, [], start, arena or Arena(self._pool, capacity), -1)
        row.arena.place(row)
        self._fill(row, request.block_ids[: -(-start // self._block_size)], start)
        if arena is not None:
            self._rows[request.request_id] = row
        return row

    def _arena_with_room(self, capacity: int) -> Arena | None:
        arena = self._arenas.get(capacity)
        if arena is not None and None in arena.rows:
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
        keys, values = row.arena.keys[:, row.index], row.arena.values[:, row.index]
        for place, block_id in enumerate(block_ids):
            first = place * self._block_size
            last = min(first + self._block_size, length)
            held_keys, held_values = self._pool[block_id, :, :, :, : last - first].unbind(1)
            keys[..., first:last] = held_keys.transpose(-1, -2)
            values[:, :, first:last] = held_values
        keys[..., length:] = 0
        values[:, :, length:] = 0

    def _drop(self, row: MirrorRow) -> None:
        row.arena.rows[row.index] = None
        if not any(row.arena.rows):
            del self._arenas[row.arena.capacity]
