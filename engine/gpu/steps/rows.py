"""Assigns requests to rows of the device, and keeps each row's state there.

A request keeps its row while it is in every step; in a pipeline, for as long as it runs. A decode graph computes all
rows up to the last one in use, so rows far out move to vacant ones nearer to zero.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from engine.config import EngineConfig
from engine.gpu.pinning import upload
from engine.request import RequestId
from engine.request_states import RequestState

MAX_GRAPH_TOKENS = 1024  # of the largest step with prompts that has a graph


def most_tokens(config: EngineConfig) -> int:
    """Return the most tokens of a step, with the padding of a graph."""
    return max(config.max_num_batched_tokens, config.max_num_seqs, MAX_GRAPH_TOKENS)


def bucket_sizes(max_rows: int) -> list[int]:
    """Return the row counts of decode graphs: dense at first, then growing by at most a quarter."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 128, 16), *range(128, 513, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(slots=True)
class RowChanges:
    """Rows that a step changes: `fresh` rows need all state, `moved` rows only their last token from the old row."""

    fresh: list[tuple[int, RequestState]] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)  # (old row, new row)


class RowTable:
    """Which request has which of the rows 0 .. max_rows - 1."""

    def __init__(self, max_rows: int, keeps: bool) -> None:
        """keeps: requests that a step leaves out keep their rows until they are forgotten, and no row moves."""
        self.buckets = bucket_sizes(max_rows)  # of the rows of graphs, ascending
        self._keeps = keeps
        self._rows: dict[RequestId, int] = {}
        self._owner: list[RequestState | None] = [None] * max_rows
        self._vacant = list(range(max_rows))  # heap

    def row_of(self, request: RequestState) -> int:
        return self._rows[request.request_id]

    @property
    def extent(self) -> int:
        """Number of rows up to the last one in use."""
        return max(self._rows.values(), default=-1) + 1

    def bucket(self) -> int:
        """Return the smallest bucket that holds all rows in use."""
        return self.buckets[bisect_left(self.buckets, self.extent)]

    def sync(self, requests: Sequence[RequestState]) -> RowChanges:
        """Give every request of the step a row, and free the rows of all others. At most max_rows requests."""
        changes = RowChanges()
        if not self._keeps:
            names = {request.request_id for request in requests}
            self.forget([name for name in self._rows if name not in names])
        for request in requests:
            row = self._rows.get(request.request_id)
            if row is not None and self._owner[row] is not request:
                self._release(request.request_id)  # a later request of the same name
                row = None
            if row is None:
                changes.fresh.append((self._take(request), request))
        if not self._keeps:
            self._compact(changes)
        return changes

    def forget(self, names: Iterable[RequestId]) -> None:
        """Free the rows of the requests `names`."""
        for name in names:
            if name in self._rows:
                self._release(name)

    def clear(self) -> None:
        """Free all rows: the next step has only fresh ones."""
        self.forget(list(self._rows))

    def _compact(self, changes: RowChanges) -> None:
        """Move the last rows to vacant ones, as long as that allows a smaller bucket."""
        target = self.buckets[bisect_left(self.buckets, max(len(self._rows), 1))]
        if self.extent <= target:
            return
        fresh = {row for row, _ in changes.fresh}
        for request in [owner for owner in self._owner[target:] if owner is not None]:
            old = self._rows[request.request_id]
            self._release(request.request_id)
            new = self._take(request)
            if old in fresh:
                changes.fresh = [(new if row == old else row, owner) for row, owner in changes.fresh]
            else:
                changes.moved.append((old, new))

    def _take(self, request: RequestState) -> int:
        row = heappop(self._vacant)
        self._rows[request.request_id] = row
        self._owner[row] = request
        return row

    def _release(self, name: RequestId) -> None:
        row = self._rows.pop(name)
        self._owner[row] = None
        heappush(self._vacant, row)


class DeviceState:
    """What the device keeps of each row between steps: its block table and its last token.

    Block tables grow by an entry every `block_size` steps, so only changes are uploaded. The sampler writes the last
    token on the device; the host sends one only when a request gets its row.

    block_tables: int32 (max_rows, max_blocks) for each KV group. last_tokens: int64 (max_rows + 1,); the last entry
        belongs to no row and takes writes of padding.
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device, num_groups: int = 1) -> None:
        """max_blocks: of a request, in each KV group."""
        self._tables = torch.zeros(num_groups, max_rows, max_blocks, dtype=torch.int32, device=device)
        self.block_tables = tuple(self._tables)
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._num_uploaded = [0] * max_rows  # entries of each row's block tables, summed over groups
        self._max_blocks = max_blocks
        self._device = device

    def apply(self, changes: RowChanges) -> None:
        """Write the last tokens of rows that belong to another request now."""
        if changes.moved:
            old, new = zip(*changes.moved, strict=True)
            source = upload(old, torch.int64, self._device)
            self.last_tokens[upload(new, torch.int64, self._device)] = self.last_tokens[source]
            for row in new:
                self._num_uploaded[row] = 0
        if changes.fresh:
            rows = [row for row, _ in changes.fresh]
            tokens = [request.token_ids[-1] for _, request in changes.fresh]
            fresh = upload([rows, tokens], torch.int64, self._device)
            self.last_tokens.index_copy_(0, fresh[0], fresh[1])
            for row in rows:
                self._num_uploaded[row] = 0

    def upload_blocks(self, rows: Sequence[int], requests: Sequence[RequestState]) -> None:
        """Upload the block ids that the device does not have yet."""
        places: list[int] = []
        values: list[int] = []
        uploaded, count = self._num_uploaded, len(self.block_tables)
        for row, request in zip(rows, requests, strict=True):
            block_ids = request.block_ids
            first = uploaded[row]
            if len(block_ids) > first:
                for group, table in enumerate(self.block_tables):
                    start = (group * table.shape[0] + row) * self._max_blocks
                    places += range(start + first // count, start + len(block_ids) // count)
                    values += block_ids[first + group :: count]
                uploaded[row] = len(block_ids)
        if not places:
            return
        pair = upload([places, values], torch.int64, self._device)
        self._tables.view(-1).index_copy_(0, pair[0], pair[1].int())
