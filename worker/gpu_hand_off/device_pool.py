"""A worker's pool in GPU memory for its transports: digests, copies to and from host rows.

Several threads use it next to the step loop, each on its own high-priority stream. A step in flight may still write
to blocks of a request that has ended, after they are given to a load. So `fence` records the position of the step
stream when blocks are given to loads, and copies into the pool wait for the last fence. Reads of blocks that the host
knows to be finished need no fence.

On a CPU, in tests, the same runs without streams.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, TransferError
from engine.host_tier.pinning import pin
from kernels.kv_copies import kernels_for
from kvstore.pool.digest import WORD_BYTES, digest_weights
from kvstore.transports.transport import Blocks
from kvstore.types import BlockId, merged_runs

logger = logging.getLogger("engine")


class CopyLists:
    """Pinned buffers for one copy's block ids on their way to the device, and for its digests on their way back.

    For one stream and one copy at a time. A pull of 60 MB takes 150 us; an unpinned list takes 20.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = torch.empty(0, dtype=torch.int64, device=device)
        self._pinned = torch.empty(0, dtype=torch.int64)
        self._host = self._pinned.numpy()  # view of the same memory

    def upload(self, *lists: Sequence[BlockId]) -> Tensor:
        """Return int64 (1 + len(lists), length): zeros for digests, then the lists, which have equal lengths."""
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
        """Wait for the copy, and return its digests."""
        count = len(digests)
        self._pinned[:count].copy_(digests, non_blocking=True)
        if digests.is_cuda:
            torch.cuda.current_stream(digests.device).synchronize()
        found: list[int] = self._host[:count].view("uint64").tolist()
        return found


class DevicePool:
    """kv_pool: (num_blocks, *geometry.block_shape) of any dtype."""

    def __init__(self, kv_pool: Tensor) -> None:
        self.words = kv_pool.view(kv_pool.shape[0], -1).view(torch.int64)
        self.device = kv_pool.device
        self._on_gpu = kv_pool.is_cuda
        self._weights: dict[int, Tensor] = {}  # by words of a block: blocks of other ranks may have another size
        self.weights_of(self.words.shape[1])
        self._digest_blocks: Any = kernels_for(self._on_gpu).digest_blocks
        self._own = threading.local()  # .stream, .lists
        self._fence: torch.cuda.Event | None = None

    @property
    def block_bytes(self) -> int:
        return self.words.shape[1] * WORD_BYTES

    def fence(self, of: DevicePool | None = None) -> None:
        """Record the position of the step stream, after a step was launched and before loads get their blocks.

        of: rank 0's pool, for the pool of another rank, whose steps this process does not launch. Those have written
        their KV before rank 0's last all-reduce ends, or before the last stage gets a step's hidden states.
        """
        if of is not None:
            self._fence = of._fence
        elif self._on_gpu:
            self._fence = self.mark()

    def is_behind_fence(self) -> bool:
        """Whether all steps before the last fence have ended."""
        return self._fence is None or bool(self._fence.query())  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """Record the current stream's position; None on a CPU, whose work is always complete."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def digests(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Return digests of finished blocks, as `kvstore.pool.digest` computes them. Raises TransferError."""
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
        """Return host memory in the form that `copy_in` takes.

        pinned: pin its pages in the background for faster copies. Until then, copies go through the driver's buffers.
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
        """Return the digest weights of blocks of `num_words`. Two threads may compute the same ones."""
        if num_words not in self._weights:
            weights = torch.stack([torch.from_numpy(each) for each in digest_weights(num_words)])
            self._weights[num_words] = weights.to(self.device)
        return self._weights[num_words]

    def lists(self) -> CopyLists:
        """Return this thread's lists."""
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
        """Make this thread's stream current, after the fence if `writes_pool`. Raises TransferError.

        The body must wait for the end of its work.
        """
        with torch.inference_mode():
            if not self._on_gpu:
                yield
                return
            if not hasattr(self._own, "stream"):
                self._own.stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            stream, fence = self._own.stream, self._fence
            try:
                with torch.cuda.stream(stream):  # makes its device current, too
                    if writes_pool and fence is not None:
                        stream.wait_event(fence)
                    yield
            except torch.AcceleratorError as error:
                raise TransferError("the device failed while it copied KV blocks") from error
            except torch.OutOfMemoryError as error:
                raise TransferError("the device has no memory for KV blocks on their way") from error


class _Readable:
    """Read-only memory that claims to be writable: torch has no read-only tensors, and would warn."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.__array_interface__ = {**blocks.__array_interface__, "data": (blocks.ctypes.data, False)}


def _pin(memory: Tensor, device: torch.device) -> None:
    """Pin memory; needs its own thread, as it takes long and CUDA reports a failure on the thread's next call."""
    try:
        with torch.cuda.device(device):
            pin(memory, is_read_only=True)
    except ConfigError:
        logger.info("the driver does not pin a peer's memory: its KV is copied through the driver's buffers")
