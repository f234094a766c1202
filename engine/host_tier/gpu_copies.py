"""Copies between the pool and host slots beside the step stream, so that decode steps hardly wait for them.

Out: blocks are gathered into a piece of device memory at its full bandwidth, and the step goes on; a second stream
brings the piece to the host. In: the second stream fetches slots into such a piece while the step before may still
run, and the step stream scatters them. Copies over PCIe are few and long where slots follow each other.

Host slots are pinned. On a CPU, for tests, the same code runs in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.gpu.pinning import NUM_PIECES, PIECE_BYTES, upload
from engine.host_tier.pinning import pin
from kernels.kv_copies import kernels_for
from kvstore.types import BlockId, HostSlot, merged_runs


class HostCopies:
    """Between one pool and one buffer of host slots uint8 (num_slots, block_bytes)."""

    def __init__(self, pool: Tensor, host_buffer: Tensor, piece_bytes: int = PIECE_BYTES) -> None:
        """Pins `host_buffer`. Raises ConfigError when the driver refuses."""
        self._torch: Any = torch.cuda if pool.is_cuda else torch.cpu  # streams and events of the device
        # Here, because the first needs triton.
        self._kernels = kernels_for(pool.is_cuda)
        self._words = pool.view(pool.shape[0], -1).view(torch.int64)
        self._host = host_buffer
        if pool.is_cuda:
            pin(host_buffer)
        self._most = max(piece_bytes // host_buffer.shape[1], 1)
        shape = (self._most, self._words.shape[1])
        self._pieces = [torch.empty(shape, dtype=torch.int64, device=pool.device) for _ in range(NUM_PIECES)]
        self._are_free = [self._torch.Event() for _ in range(NUM_PIECES)]  # not recorded yet: free
        self._order = torch.arange(self._most, dtype=torch.int32, device=pool.device)
        self._side = self._torch.Stream()
        self._turn = 0

    def warm_up(self) -> None:
        """Compile the kernel, by a copy of the pool's first block that nobody reads."""
        self._kernels.copy_blocks(self._words, self._upload([0]), self._pieces[0], self._order[:1])

    def out(self, copies: Sequence[tuple[BlockId, HostSlot]]) -> Callable[[], None]:
        """Copy blocks as they are now to slots. The returned function waits until the slots are written."""
        written = self._torch.Event()
        step = self._torch.current_stream()
        for part in self._parts(copies):
            blocks, slots = zip(*part, strict=True)
            piece, is_free = self._next_piece()
            step.wait_event(is_free)
            self._kernels.copy_blocks(self._words, self._upload(blocks), piece, self._order[: len(part)])
            self._side.wait_stream(step)
            with self._torch.stream(self._side):
                rows = piece.view(torch.uint8)
                for row, slot, count in merged_runs(list(enumerate(slots))):
                    self._host[slot : slot + count].copy_(rows[row : row + count], non_blocking=True)
                is_free.record(self._side)
                written.record(self._side)
        wait: Callable[[], None] = written.synchronize
        return wait

    def into(self, copies: Sequence[tuple[HostSlot, BlockId]]) -> Callable[[], None]:
        """Copy slots to blocks, before what the step stream gets next; they see all copies `out` that came before.

        The returned function waits until the slots have been read.
        """
        read = self._torch.Event()
        step = self._torch.current_stream()
        for part in self._parts(copies):
            slots, blocks = zip(*part, strict=True)
            piece, is_free = self._next_piece()
            self._side.wait_event(is_free)
            with self._torch.stream(self._side):
                rows = piece.view(torch.uint8)
                for slot, row, count in merged_runs([(slot, row) for row, slot in enumerate(slots)]):
                    rows[row : row + count].copy_(self._host[slot : slot + count], non_blocking=True)
                read.record(self._side)
            step.wait_event(read)
            self._kernels.copy_blocks(piece, self._order[: len(part)], self._words, self._upload(blocks))
            is_free.record(step)
        wait: Callable[[], None] = read.synchronize
        return wait

    def _parts(self, copies: Sequence[Any]) -> list[Sequence[Any]]:
        return [copies[first : first + self._most] for first in range(0, len(copies), self._most)]

    def _next_piece(self) -> tuple[Tensor, Any]:
        """A piece, and the event after which it may be filled: record it when its content has been used."""
        self._turn = (self._turn + 1) % NUM_PIECES
        return self._pieces[self._turn], self._are_free[self._turn]

    def _upload(self, ids: Sequence[int]) -> Tensor:
        return upload(ids, torch.int32, self._words.device)
