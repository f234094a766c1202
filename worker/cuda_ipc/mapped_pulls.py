"""Pulls from mapped pools of peers into a worker's own pool in GPU memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, int64

from common.errors import TransferError
from engine.cuda_ipc.device_memory import tensor_over
from kernels.kv_copies import kernels_for
from kernels.kv_copies.kv_copy import WordCopy
from kvstore.layout import HeadCopy
from kvstore.pool.digest import WORD_BYTES
from kvstore.transports.cuda_ipc import cuda_memory
from kvstore.transports.cuda_ipc.cuda_memory import CudaMemory
from kvstore.transports.cuda_ipc.reader import RemotePool
from kvstore.types import BlockId
from worker.gpu_hand_off.device_pool import DevicePool


class AttachedPool:
    """A peer's mapped pool. words: int64 (num_blocks, num_words)."""

    def __init__(self, memory: CudaMemory, words: Tensor) -> None:
        self.words = words
        self._memory = memory

    def close(self) -> None:
        self._memory.close()


def in_words(copy: HeadCopy) -> WordCopy:
    """Convert the copy to 64-bit words. Raises TransferError if a head's bytes are not whole words."""
    bytes_of = copy.width, copy.source_offset, copy.source_pitch, copy.target_offset, copy.target_pitch
    if any(count % WORD_BYTES for count in bytes_of):
        raise TransferError("a head's part of a KV block is not a multiple of 8 bytes")
    return WordCopy(copy.height, *(count // WORD_BYTES for count in bytes_of))


class MappedPulls:
    """Implements `kvstore.transports.cuda_ipc.reader.MappingPool`."""

    def __init__(self, pool: DevicePool) -> None:
        """Compile the kernel before requests come, which takes 0.1 s, by copying the first block onto itself."""
        self._pool, self._kernels = pool, kernels_for(pool.words.is_cuda)
        self._copy(pool.words, [BlockId(0)], [BlockId(0)], None)

    def attach(self, fd: int, num_blocks: int, block_bytes: int) -> AttachedPool:
        """See MappingPool."""
        device = self._pool.device
        memory = cuda_memory.attach(device.index or 0, fd, num_blocks * block_bytes)
        self._pool.weights_of(block_bytes // WORD_BYTES)
        return AttachedPool(memory, tensor_over(memory, device).view(int64).view(num_blocks, -1))

    def pull(
        self, remote: RemotePool, remote_ids: Sequence[BlockId], local_ids: Sequence[BlockId],
        copy: HeadCopy | None = None,
    ) -> list[int]:  # fmt: skip
        """See MappingPool."""
        assert isinstance(remote, AttachedPool)
        if not remote_ids:
            return []
        return self._copy(remote.words, remote_ids, local_ids, None if copy is None else in_words(copy))

    def _copy(
        self, source: Tensor, source_ids: Sequence[BlockId], target_ids: Sequence[BlockId], part: WordCopy | None
    ) -> list[int]:
        """Copy blocks of a pool's words (num_blocks, num_words) to own ones; return digests of the source blocks."""
        pool = self._pool
        with pool.stream(writes_pool=True):
            lists = pool.lists()
            digests, sources, targets = lists.upload(source_ids, target_ids)
            self._kernels.copy_blocks(
                source, sources, pool.words, targets, pool.weights_of(source.shape[1]), part, digests
            )
            return lists.download(digests)
