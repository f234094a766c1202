"""What the device keeps of each row between steps: its block table and its last token.

Block tables grow by an entry every `block_size` steps, so only changes are uploaded. The last token is written by the
sampler on the device; the host sends one only when a request gets its row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.gpu.pinning import upload
from engine.gpu.steps.rows import RowChanges
from engine.request_states import RequestState


class DeviceState:
    """Tensors of `max_rows` rows.

    block_tables: of each KV group, int32 (max_rows, max_blocks). last_tokens: int64 (max_rows + 1,), the last of
        nobody.
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device, num_groups: int = 1) -> None:
        """max_blocks: of a request in each of the KV groups."""
        self._tables = torch.zeros(num_groups, max_rows, max_blocks, dtype=torch.int32, device=device)
        self.block_tables = tuple(self._tables)
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._num_uploaded = [0] * max_rows  # entries of each row's block table, of all groups together
        self._max_blocks = max_blocks
        self._device = device

    def apply(self, changes: RowChanges) -> None:
        """Bring rows that changed their owner up to date, but for block tables."""
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
        """Send the block ids that the device does not have yet."""
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
