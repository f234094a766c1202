"""A worker's pool in GPU memory as its transports use it: digests, copies to and from host rows.

Several threads work on it beside the step loop, each on a stream of its own with high priority. Blocks that a load
fills may still be written by a step in flight whose request has ended: `fence` marks where the step stream stands
when blocks are given to loads, and copies into the pool wait for the last mark. Reads of what the host has seen
finished need none.

On a CPU, for tests, the same without streams.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, TransferError
from engine.gpu.pinning import pin
from kvstore.pool.digest import WORD_BYTES, digest_weights
from kvstore.transports.transport import Blocks
from kvstore.types import BlockId, merged_runs

logger = logging.getLogger("engine")


class CopyLists:
    """Block ids of one copy on their way to the device and digests on their way back, through pinned memory.

    For one stream, and one copy after the other: a pull of 60 MB takes 150 us, an unpinned list 20.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = torch.empty(0, dtype=torch.int64, device=device)
        self._pinned = torch.empty(0, dtype=torch.int64)
        self._host = self._pinned.numpy()  # of the same memory

    def upload(self, *lists: Sequence[BlockId]) -> Tensor:
        """int64 (1 + len(lists), length): zeros for digests, then the lists, which are as long as each other."""
        shape = 1 + len(lists), len(lists[0])
        size = shape[0] * shape[1]
        if size > len(self._host):
            self._on_device = torch.empty(2 * size, dtype=torch.int64, device=self._on_device.device)
            self._pinned = torch.empty(2 * size, dtype=torch.int64, pin_memory=self._on_device.is_cuda)
            self._host = self._pinned.numpy()
        host = self._host[:size].reshape(shape)
        host[0] = 0
        host[1:] = lists
        on_device = self._on_device[:size]
        on_device.copy_(self._pinned[:size], non_blocking=True)
        return on_device.view(shape)

    def download(self, digests: Tensor) -> list[int]:
        """Wait for all of the copy."""
        count = len(digests)
        self._pinned[:count].copy_(digests, non_blocking=True)
        if digests.is_cuda:
            torch.cuda.current_stream(digests.device).synchronize()
        found: list[int] = self._host[:count].view("uint64").tolist()
        return found


class DevicePool:
    """kv_pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim) of any dtype."""

    def __init__(self, kv_pool: Tensor) -> None:
        self.words = kv_pool.view(kv_pool.shape[0], -1).view(torch.int64)
        self.device = kv_pool.device
        self._on_gpu = kv_pool.is_cuda
        self._weights: dict[int, Tensor] = {}  # by words of a block: those of other ranks have more, or fewer
        self.weights_of(self.words.shape[1])
        # Here, because the first needs triton.
        kernels = import_module("kernels.gpu.elementwise.kv_digest" if self._on_gpu else "kernels.kv_digest")
        self._digest_blocks: Any = kernels.digest_blocks
        self._own = threading.local()  # .stream, .lists
        self._fence: torch.cuda.Event | None = None

    @property
    def block_bytes(self) -> int:
        return self.words.shape[1] * WORD_BYTES

    def fence(self, of: DevicePool | None = None) -> None:
        """Mark where the step stream stands: after a step was launched, before loads get their blocks.

        of: rank 0's pool, for that of another rank, whose steps this process does not launch. They have written their
        KV before rank 0's last sum over ranks ends, or before the last stage has got a step's hidden states.
        """
        if of is not None:
            self._fence = of._fence
        elif self._on_gpu:
            self._fence = self.mark()

    def is_behind_fence(self) -> bool:
        """Whether the steps before the last mark have ended."""
        return self._fence is None or bool(self._fence.query())  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """Where the current stream stands; None on a CPU, whose work has ended."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def digests(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Digests of blocks that the host has seen finished, as `kvstore.pool.digest` computes them.

        Raises TransferError.
        """
        if not block_ids:
            return []
        with self.stream(writes_pool=False):
            lists = self.lists()
            digests, ids = lists.upload(block_ids)
            self._digest_blocks(self.words, ids, self.weights_of(self.words.shape[1]), digests)
            return lists.download(digests)

    def copy_out(self, block_ids: Sequence[BlockId], rows: Tensor, row_ids: Sequence[int]) -> None:
        """Copy finished blocks to host rows uint8 (num_rows, block_bytes), and wait."""
        with self.stream(writes_pool=False):
            blocks = self.words.view(torch.uint8)
            for block, row, count in merged_runs(list(zip(block_ids, row_ids, strict=True))):
                rows[row : row + count].copy_(blocks[block : block + count], non_blocking=True)
            self.synchronize()

    def readable(self, blocks: Blocks, pinned: bool) -> Tensor:
        """Host memory as `copy_in` takes it.

        pinned: its pages may be pinned for faster copies. Until they are, copies go through the driver's buffers.
        """
        rows = torch.from_numpy(np.asarray(_Readable(blocks)))
        if self._on_gpu and pinned:
            threading.Thread(target=_pin, args=(rows, self.device), daemon=True).start()
        return rows

    def copy_in(self, rows: Tensor, row_ids: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        """Copy host rows to blocks, and wait. Raises TransferError."""
        with self.stream(writes_pool=True):
            blocks = self.words.view(torch.uint8)
            for row, block, count in merged_runs(list(zip(row_ids, block_ids, strict=True))):
                blocks[block : block + count].copy_(rows[row : row + count], non_blocking=True)
            self.synchronize()

    def weights_of(self, num_words: int) -> Tensor:
        """Weights of digests of blocks of so many words. Two threads may make the same ones."""
        if num_words not in self._weights:
            weights = torch.stack([torch.from_numpy(each) for each in digest_weights(num_words)])
            self._weights[num_words] = weights.to(self.device)
        return self._weights[num_words]

    def lists(self) -> CopyLists:
        """This thread's."""
        if not hasattr(self._own, "lists"):
            self._own.lists = CopyLists(self.device)
        lists: CopyLists = self._own.lists
        return lists

    def synchronize(self) -> None:
        """Wait for the current stream."""
        if self._on_gpu:
            torch.cuda.current_stream(self.device).synchronize()

    @contextlib.contextmanager
    def stream(self, writes_pool: bool) -> Iterator[None]:
        """This thread's stream, made current; what writes to the pool comes after the fence. Raises TransferError.

        The body waits for the end of its work.
        """
        with torch.inference_mode():
            if not self._on_gpu:
                yield
                return
            if not hasattr(self._own, "stream"):
                self._own.stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            stream, fence = self._own.stream, self._fence
            try:
                with torch.cuda.stream(stream):  # and its device
                    if writes_pool and fence is not None:
                        stream.wait_event(fence)
                    yield
            except torch.AcceleratorError as error:
                raise TransferError("the device failed while it copied KV blocks") from error
            except torch.OutOfMemoryError as error:
                raise TransferError("the device has no memory for KV blocks on their way") from error


class _Readable:
    """Read-only memory that says it is writable: torch knows no tensors that are not, and warns."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.__array_interface__ = {**blocks.__array_interface__, "data": (blocks.ctypes.data, False)}


def _pin(memory: Tensor, device: torch.device) -> None:
    """For a thread of its own: it takes long, and CUDA keeps a thread's last failure for its next call."""
    try:
        with torch.cuda.device(device):
            pin(memory, is_read_only=True)
    except ConfigError:
        logger.info("the driver does not pin a peer's memory: its KV is copied through the driver's buffers")
