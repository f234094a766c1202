"""Between the pool and the memory that peers can reach: the same memory on a CPU, a staging area in front of a GPU.

`blocks` (uint8 [num, block_bytes]) is what peers read and what pulls write to. The rank exports a prompt's blocks
when it grants a lease, and takes loaded blocks in before a request may use them. Called from the rank's loop only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kv_memory import copy_in, copy_out
from kvstore.block_pool import BlockPool
from kvstore.types import BlockId, HostSlot

Blocks = npt.NDArray[np.uint8]


class KvExchange(Protocol):
    """What a lease names and a load fills are rows of `blocks`."""

    blocks: Blocks

    def export(self, block_ids: Sequence[BlockId]) -> list[BlockId] | None:
        """Take over the caller's references and return the rows that hold these blocks' bytes; None without room."""
        ...

    def end_export(self, rows: Sequence[BlockId]) -> None: ...

    def open_load(self, block_ids: Sequence[BlockId]) -> list[BlockId] | None:
        """Rows to fill for pool blocks `block_ids`; None without room."""
        ...

    def close_load(self, rows: Sequence[BlockId], block_ids: Sequence[BlockId], ok: bool) -> None:
        """The rows are filled (ok) or given up."""
        ...


class DirectExchange:
    """The pool itself is shared: rows are pool blocks, and a lease holds their references."""

    def __init__(self, blocks: Blocks, pool: BlockPool) -> None:
        self.blocks = blocks
        self._pool = pool

    def export(self, block_ids: Sequence[BlockId]) -> list[BlockId] | None:
        return list(block_ids)

    def end_export(self, rows: Sequence[BlockId]) -> None:
        self._pool.release(rows)

    def open_load(self, block_ids: Sequence[BlockId]) -> list[BlockId] | None:
        return list(block_ids)

    def close_load(self, rows: Sequence[BlockId], block_ids: Sequence[BlockId], ok: bool) -> None:
        """Nothing to do: the bytes are where they belong."""


class StagedExchange:
    """A pool in device memory behind pinned host rows. Copies go over the step's stream, so they see whole blocks.

    kv_pool: the device's pool; staging: uint8 (num_rows, block_bytes) over the shared memory that `blocks` is, too.
    """

    def __init__(self, blocks: Blocks, staging: Tensor, kv_pool: Tensor, pool: BlockPool) -> None:
        self.blocks = blocks
        self._staging = staging
        self._kv_pool = kv_pool
        self._pool = pool
        self._rows = BlockPool(len(blocks), enable_prefix_cache=False)

    def export(self, block_ids: Sequence[BlockId]) -> list[BlockId] | None:
        rows = self._take(len(block_ids))
        if rows is not None:
            with torch.inference_mode():
                pairs = [(block, HostSlot(row)) for block, row in zip(block_ids, rows, strict=True)]
                copy_out(self._kv_pool, self._staging, pairs)
            self._wait()
        self._pool.release(block_ids)  # the bytes are in the rows now, or nobody will read them
        return rows

    def end_export(self, rows: Sequence[BlockId]) -> None:
        self._rows.release(rows)

    def open_load(self, block_ids: Sequence[BlockId]) -> list[BlockId] | None:
        return self._take(len(block_ids))

    def close_load(self, rows: Sequence[BlockId], block_ids: Sequence[BlockId], ok: bool) -> None:
        if ok:
            with torch.inference_mode():
                pairs = [(HostSlot(row), block) for row, block in zip(rows, block_ids, strict=True)]
                copy_in(self._kv_pool, self._staging, pairs)
            self._wait()  # the rows are free for others after this
        self._rows.release(rows)

    def _take(self, count: int) -> list[BlockId] | None:
        return self._rows.allocate(count) if count <= self._rows.num_available else None

    def _wait(self) -> None:
        if self._kv_pool.is_cuda:
            torch.cuda.current_stream().synchronize()
