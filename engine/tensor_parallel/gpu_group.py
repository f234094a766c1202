"""Collectives of a tensor-parallel group on the GPUs of one host, or of one stage.

Few rows go through symmetric memory, which all ranks map; all-reduces of long prompts go through NCCL.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from engine.config import EngineConfig
from engine.cuda_ipc.device_memory import tensor_over
from engine.gpu.ops.rules import Vocabulary
from engine.gpu.pinning import upload
from engine.gpu.steps.rows import most_tokens
from engine.loader.load import LoadedModel
from engine.tensor_parallel.group import store_in
from kernels.gpu.collectives.all_reduce import (
    GATHER_CHUNK,
    SymmetricMemory,
    all_gather,
    all_reduce_rms_norm,
    all_reduce_rms_norm_quantize,
    symmetric_bytes,
)
from kernels.gpu.elementwise.rms_norm import add_rms_norm
from kernels.gpu.expert_parallel.exchange_memory import ExchangeLayout, ExchangeMemory, rows_a_rank
from kernels.gpu.quantization.quantize import add_rms_norm_quantize
from kvstore.layout import Shard
from kvstore.transports.cuda_ipc import cuda_memory

MAX_SUM_ROWS = 512  # for more, NCCL's bandwidth decides
NCCL_BYTES = 1_000_000_000  # generous estimate of its channels' buffers
NCCL_TIMEOUT = timedelta(minutes=2)
Exchange = Callable[[int], Sequence[int]]
"""Gives this rank's descriptor to all ranks and returns all ranks' in order, which the caller closes."""


class DeviceGroup:
    """Collectives of one GPU per rank. Any failure is final, since ranks may then be at different steps."""

    def __init__(
        self, shard: Shard, device: torch.device, widths: tuple[int, int], dtype: torch.dtype, max_rows: int,
        exchange: Exchange, store: Path, around_experts: ExchangeLayout | None = None, counts: bool = False,
    ) -> None:  # fmt: skip
        """Wait until all ranks have come.

        widths: of a hidden state and of a rank's logits. max_rows: rows of logits per all-gather. store: the path of
        a file that does not exist yet, the same for all ranks. around_experts: if ranks divide rows around experts.
        counts: count rows that move.
        """
        self.rank, self.size, self.dtype = shard.rank, shard.size, dtype
        self._max_rows = max_rows
        hidden, vocab = widths
        num_chunks = _num_gathered_chunks(vocab, max_rows)
        sums, gathers = _memory_bytes(self.size, widths, dtype, max_rows)
        num_bytes = sums + gathers + (around_experts.num_bytes if around_experts else 0)
        self._memory, addresses = _map_all(device, self.rank, num_bytes, exchange)
        self._sums = SymmetricMemory(
            torch.tensor(addresses, device=device), _zeros(MAX_SUM_ROWS, device), self.rank, self.size,
            MAX_SUM_ROWS, hidden, dtype,
        )  # fmt: skip
        self._gathers = SymmetricMemory(
            torch.tensor([address + sums for address in addresses], device=device), _zeros(num_chunks, device),
            self.rank, self.size, num_chunks, GATHER_CHUNK, dtype,
        )  # fmt: skip
        self.rows: ExchangeMemory | None = None  # if ranks divide rows around experts
        if around_experts is not None:
            first = sums + gathers
            self.rows = ExchangeMemory.over(
                around_experts, self.rank, torch.tensor([address + first for address in addresses], device=device),
                tensor_over(self._memory[self.rank], device)[first : first + around_experts.num_bytes], counts,
            )  # fmt: skip
        self._nccl = open_nccl(store, self.rank, self.size)
        self._nccl.allreduce([torch.zeros(1, device=device)]).wait()  # connects the ranks while the store exists
        keep_group(self._nccl)

    def all_reduce_rms_norm(self, pending: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of all ranks' pending outputs to the residual, in place, and return its norm."""
        if pending.shape[0] <= MAX_SUM_ROWS:
            return all_reduce_rms_norm(pending, residual, weight, eps, self._sums)
        self._nccl.allreduce([pending]).wait()
        return add_rms_norm(pending, residual, weight, eps)

    def all_reduce_rms_norm_quantize(
        self, pending: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, num_planes: int
    ) -> tuple[Tensor, Tensor]:
        """Compute `all_reduce_rms_norm` and quantize the norm, see `kernels.gpu.quantization.quantize`."""
        if pending.shape[0] <= MAX_SUM_ROWS:
            return all_reduce_rms_norm_quantize(pending, residual, weight, eps, self._sums, dtype, num_planes)
        self._nccl.allreduce([pending]).wait()
        return add_rms_norm_quantize(pending, residual, weight, eps, dtype, num_planes)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send rows of x (sum(send), columns) and return those received (sum(receive), columns), without waiting."""
        out = torch.empty(sum(receive), x.shape[1], dtype=x.dtype, device=x.device)
        self._nccl.alltoall_base(out, x, list(receive), list(send)).wait()  # the stream waits
        return out

    def all_gather(self, x: Tensor, only: Tensor | None = None) -> Tensor:
        """Concatenate each rank's (n, columns) to (n, size * columns). only: see `all_reduce`, for few rows."""
        if x.shape[0] <= self._max_rows:
            return all_gather(x, self._gathers, only)
        return torch.cat([all_gather(part, self._gathers) for part in torch.split(x, self._max_rows)])


class VocabShards(Vocabulary):
    """The part of the vocabulary whose logits a rank has, and the gathering of the whole."""

    def __init__(self, group: DeviceGroup, vocab_size: int) -> None:
        """vocab_size: of the whole model."""
        self._group = group
        self._vocab_size = vocab_size
        per_rank = -(-vocab_size // group.size)
        first_id = group.rank * per_rank
        self._own = min(per_rank, vocab_size - first_id), first_id  # the last rank's logits may end in padding

    def own(self, logits: Tensor) -> tuple[int, int]:
        return self._own

    def joined(self, stats: Tensor, logits: Tensor, truncates: Tensor, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """See Vocabulary. stats: float32 (rows, chunks, 4) of each rank."""
        flat = stats.flatten(1).view(self._group.dtype)
        stats = self._group.all_gather(flat).view(torch.float32).view(stats.shape[0], -1, 4)
        return stats, self.gathered(logits, truncates[rows])

    def gathered(self, logits: Tensor, only: Tensor | None = None) -> Tensor:
        """See Vocabulary. only: see `all_gather`."""
        return self._group.all_gather(logits.contiguous(), only)[:, : self._vocab_size]

    def whole(self, logits: Tensor, sources: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        return self.gathered(logits[upload(sources, torch.int64, logits.device)]), range(len(sources))


def open_group(loaded: LoadedModel, config: EngineConfig, exchange: Exchange, folder: Path) -> DeviceGroup:
    """Open the group of a rank's model or stage. Waits until all ranks have come. folder: see `store_in`."""
    widths = loaded.model.config.hidden_size, loaded.model.config.vocab_size
    store = store_in(folder, loaded.shard)
    return DeviceGroup(
        loaded.shard, loaded.device, widths, loaded.dtype, config.max_num_seqs, exchange, store,
        _around_experts(loaded, config),
    )  # fmt: skip


def _around_experts(loaded: LoadedModel, config: EngineConfig) -> ExchangeLayout | None:
    shape, size = loaded.model.config, loaded.shard.size
    if shape.moe is None or shape.moe.exchange == "sum":
        return None
    max_rows = rows_a_rank(most_tokens(config), size)
    return ExchangeLayout(size, max_rows, shape.hidden_size, shape.moe.num_experts_per_token, loaded.dtype)


def group_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """Return the memory of the rank's group on its GPU; 0 without a group."""
    size, shape = loaded.shard.size, loaded.model.config
    if size == 1:
        return 0
    memory = _memory_bytes(size, (shape.hidden_size, shape.vocab_size), loaded.dtype, config.max_num_seqs)
    gathered = config.max_num_seqs * size * shape.vocab_size * loaded.dtype.itemsize
    layout = _around_experts(loaded, config)
    return sum(memory) + gathered + NCCL_BYTES + (layout.num_bytes if layout else 0)


def _num_gathered_chunks(vocab: int, max_rows: int) -> int:
    return max_rows * -(-vocab // GATHER_CHUNK)


def _memory_bytes(size: int, widths: tuple[int, int], dtype: torch.dtype, max_rows: int) -> tuple[int, int]:
    """Return the bytes of each rank's symmetric memory for all-reduces and for all-gathers."""
    hidden, vocab = widths
    return (
        symmetric_bytes(size, MAX_SUM_ROWS, hidden, dtype),
        symmetric_bytes(size, _num_gathered_chunks(vocab, max_rows), GATHER_CHUNK, dtype),
    )


def _map_all(
    device: torch.device, rank: int, num_bytes: int, exchange: Exchange
) -> tuple[list[cuda_memory.CudaMemory], list[int]]:
    """Map this rank's zeroed memory and that of all others; returns them with their addresses here."""
    index = device.index or 0
    own, own_fd = cuda_memory.create(index, num_bytes)
    tensor_over(own, device).zero_()
    torch.cuda.synchronize(device)  # before a peer writes to it
    mapped, fds = [], exchange(own_fd)
    for peer, fd in enumerate(fds):
        if peer == rank:
            mapped.append(own)
        else:
            mapped.append(cuda_memory.attach(index, fd, num_bytes, writable=True))
        os.close(fd)
    os.close(own_fd)
    return mapped, [memory.address for memory in mapped]


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def keep_group(nccl: Any) -> None:
    """Never destroy the process group: rank 0 hung when an engine of several ranks was garbage-collected."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(nccl))


def open_nccl(store: Path, rank: int, size: int, timeout: timedelta = NCCL_TIMEOUT, goes_first: bool = False) -> Any:
    """Return the process group, which connects in its first collective.

    timeout: of one collective. goes_first: with priority for the GPU's multiprocessors.
    """
    dist: Any = torch.distributed  # its process groups have no type annotations
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.is_high_priority_stream = goes_first
    return dist.ProcessGroupNCCL(dist.FileStore(str(store), size), rank, size, options)
