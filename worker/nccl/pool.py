"""NCCL transfers from and to a worker's pool in GPU memory: messages of many blocks, through two slots.

The reader posts receives for two pieces and copies each to its blocks after arrival, with the kernel of `cuda_ipc`,
while the next one arrives. No copy to the pool is launched before its piece has arrived, so whatever happens to the
peer, no pending work can write to the pool's blocks. The owner sends consecutive blocks in place.

Several threads use it at once, each with its own link; one transfer at a time uses a pair of slots.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from common.errors import TransferError
from kernels.kv_copies import kernels_for
from kvstore.layout import HeadCopy
from kvstore.pool.digest import WORD_BYTES
from kvstore.transports.nccl.library import nccl_library, poll_until
from kvstore.transports.nccl.reader import OWNER, Link
from kvstore.transports.transport import LocalPool
from kvstore.types import BlockId
from worker.cuda_ipc.mapped_pulls import in_words
from worker.gpu_hand_off.device_pool import DevicePool
from worker.gpu_hand_off.rank_pool import DeviceRankPool
from worker.nccl.link import Connector, DeviceLink, Mark, NcclConnector

# Large, because a message costs some 10 us; not everything, because the copy of the last piece comes after it.
PIECE_BYTES = 64 << 20
NUM_SLOTS = 2
PROBE_BYTES = 64


class NcclPool:
    """Implements `kvstore.transports.nccl.reader.NcclDevice`."""

    def __init__(self, pool: DevicePool, connector: Connector) -> None:
        self.gpu = connector.gpu
        self._pool, self._kernels = pool, kernels_for(pool.words.is_cuda)
        self._connector = connector
        self._slots: list[list[Tensor]] = []  # not used by any transfer
        self._prepared: set[tuple[int, HeadCopy | None]] = set()
        self._lock = threading.Lock()

    def unique_id(self) -> bytes:
        return self._connector.unique_id()

    def connect(self, unique_id: bytes, rank: int, deadline: float) -> DeviceLink:
        """See NcclDevice."""
        with self._pool.stream(writes_pool=False):
            if rank == OWNER:
                self._compile_gather()
            link = self._connector.connect(unique_id, rank, deadline)
            probe = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=self._pool.device)
            try:
                (link.send if rank == OWNER else link.receive)(probe, deadline)
                self._wait(link, link.mark(), deadline, link.check)
            except BaseException:  # any error: a peer must not wait for the rest
                link.abort(probe)
                raise
            return link

    def piece_lengths(self, num_blocks: int, block_bytes: int) -> list[int]:
        """Return equal lengths of at most PIECE_BYTES; the last piece may be shorter."""
        most = max(PIECE_BYTES // block_bytes, 1)
        return [min(most, num_blocks - first) for first in range(0, num_blocks, most)]

    def prepare(self, block_bytes: int, copy: HeadCopy | None, deadline: float) -> None:
        """See NcclDevice. The first call may have to compile the kernel, which takes seconds."""
        if (block_bytes, copy) not in self._prepared:
            self._compile_copy(block_bytes, copy)
            self._prepared.add((block_bytes, copy))
        if not poll_until(self._pool.is_behind_fence, deadline):
            raise TransferError("the steps before the pull do not end")

    def receive(
        self, link: Link, pieces: Sequence[int], block_bytes: int, local_ids: Sequence[BlockId],
        copy: HeadCopy | None, deadline: float, check: Callable[[], None],
    ) -> list[int]:  # fmt: skip
        """See NcclDevice."""
        pool, num_words = self._pool, block_bytes // WORD_BYTES
        part, weights = None if copy is None else in_words(copy), pool.weights_of(num_words)
        with pool.stream(writes_pool=True), self._borrowed(link, max(pieces) * block_bytes) as (linked, slots):
            words = [slot.view(torch.int64).view(-1, num_words) for slot in slots]

            def post(index: int) -> Mark:
                linked.receive(words[index % NUM_SLOTS][: pieces[index]], deadline)
                return linked.mark()

            marks = [post(index) for index in range(min(NUM_SLOTS, len(pieces)))]
            lists = pool.lists()
            digests, source_ids, target_ids = lists.upload(_in_slots(pieces), local_ids)
            first = 0
            try:
                for index, length in enumerate(pieces):
                    self._wait(linked, marks[index], deadline, check)
                    here = slice(first, first + length)
                    self._kernels.copy_blocks(
                        words[index % NUM_SLOTS], source_ids[here], pool.words, target_ids[here], weights, part,
                        digests[here],
                    )  # fmt: skip
                    if index + NUM_SLOTS < len(pieces):
                        linked.after(pool.mark())
                        marks.append(post(index + NUM_SLOTS))
                    first += length
            except BaseException:  # any error: the caller may free the pieces
                pool.synchronize()  # wait for copies of pieces that have arrived
                raise
            return lists.download(digests)

    def send(
        self, link: Link, block_ids: Sequence[BlockId], pieces: Sequence[int], deadline: float,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        """See NcclDevice."""
        pool = self._pool
        firsts = [sum(pieces[:index]) for index in range(len(pieces))]
        runs = [block_ids[first : first + length] for first, length in zip(firsts, pieces, strict=True)]
        gathered = [not _are_consecutive(run) for run in runs]
        slot_bytes = max(pieces) * pool.block_bytes if any(gathered) else 0
        with pool.stream(writes_pool=False), self._borrowed(link, slot_bytes) as (linked, slots):
            if any(gathered):
                words = [slot.view(torch.int64).view(-1, pool.words.shape[1]) for slot in slots]
                _, source_ids, target_ids = pool.lists().upload(block_ids, _in_slots(pieces))
            marks: list[Mark] = []
            for index, (first, run) in enumerate(zip(firsts, runs, strict=True)):
                piece = pool.words[run[0] : run[0] + len(run)]
                if gathered[index]:
                    if index >= NUM_SLOTS:
                        self._wait(linked, marks[index - NUM_SLOTS], deadline, check)
                    here = slice(first, first + len(run))
                    slot = words[index % NUM_SLOTS]
                    self._kernels.copy_blocks(pool.words, source_ids[here], slot, target_ids[here])
                    linked.after(pool.mark())
                    piece = slot[: len(run)]
                linked.send(piece, deadline)
                marks.append(linked.mark())
            self._wait(linked, marks[-1], deadline, check)

    def _compile_copy(self, block_bytes: int, copy: HeadCopy | None) -> None:
        """Compile the kernel that `receive` uses, by copying a block of zeros to scratch memory."""
        pool, num_words = self._pool, block_bytes // WORD_BYTES
        part, weights = None if copy is None else in_words(copy), pool.weights_of(num_words)
        with pool.stream(writes_pool=False):
            source = torch.zeros(1, num_words, dtype=torch.int64, device=pool.device)
            target = torch.zeros_like(pool.words[:1])
            digests, ids = torch.zeros(2, 1, dtype=torch.int64, device=pool.device)
            self._kernels.copy_blocks(source, ids, target, ids, weights, part, digests)
            pool.synchronize()

    def _compile_gather(self) -> None:
        """Compile the kernel that `send` uses, by copying a block of the pool to scratch memory."""
        pool = self._pool
        ids = torch.zeros(1, dtype=torch.int64, device=pool.device)
        self._kernels.copy_blocks(pool.words, ids, torch.zeros_like(pool.words[:1]), ids)
        pool.synchronize()

    @contextlib.contextmanager
    def _borrowed(self, link: Link, num_bytes: int) -> Iterator[tuple[DeviceLink, list[Tensor]]]:
        """Yield the link, and slots of `num_bytes`. A failure aborts the link, which keeps the slots to its end."""
        linked: DeviceLink = link  # type: ignore[assignment]  # it was returned by `connect`
        with self._lock:
            slots = self._slots.pop() if num_bytes and self._slots else []
        if num_bytes and (not slots or slots[0].nbytes < num_bytes):
            slots = []  # frees the smaller ones first
            size, device = -(-num_bytes // WORD_BYTES) * WORD_BYTES, self._pool.device
            slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        try:
            yield linked, [slot[:num_bytes] for slot in slots]
        except BaseException:  # any error: a peer must not wait for the rest
            linked.abort(*slots)
            raise
        if slots:
            with self._lock:
                self._slots.append(slots)

    def _wait(self, link: DeviceLink, mark: Mark, deadline: float, check: Callable[[], None]) -> None:
        """Wait for a message. Raises TransferError if peer or communicator fail, or at the deadline."""

        def has_come() -> bool:
            if mark.query():
                return True
            check()
            link.check()
            return False

        if not poll_until(has_come, deadline):
            raise TransferError("the peer has stopped during the transfer")


def open_nccl(pool: LocalPool) -> NcclPool | None:
    """Return NCCL for a pool on a GPU; None for other pools, or without the library."""
    if not isinstance(pool, DeviceRankPool):
        return None
    library = nccl_library()
    return None if library is None else NcclPool(pool.device, NcclConnector(library, pool.device.device))


def _in_slots(pieces: Sequence[int]) -> list[BlockId]:
    """Return each block's row in its slot."""
    return [BlockId(row) for length in pieces for row in range(length)]


def _are_consecutive(block_ids: Sequence[BlockId]) -> bool:
    return list(block_ids) == list(range(block_ids[0], block_ids[0] + len(block_ids)))
