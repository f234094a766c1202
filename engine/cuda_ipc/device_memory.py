"""CUDA memory that is not torch's, as tensors."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.kv.memory import TORCH_DTYPES
from engine.start_failures.explained import describe_out_of_memory
from kvstore.layout import WHOLE, PoolGeometry
from kvstore.transports.cuda_ipc import cuda_memory
from kvstore.transports.cuda_ipc.cuda_memory import CudaMemory

logger = logging.getLogger("engine")


class DeviceMemoryView:
    """A CUDA mapping as torch.as_tensor takes it: bytes without an owner."""

    def __init__(self, memory: CudaMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3
        }  # fmt: skip


def tensor_over(memory: CudaMemory, device: torch.device) -> Tensor:
    """The mapping as uint8 (num_bytes,). Valid until the mapping is closed."""
    return torch.as_tensor(DeviceMemoryView(memory), device=device)


def pool_for_others(geometry: PoolGeometry, device: torch.device) -> tuple[Tensor, int] | None:
    """A `shareable_pool`; None where the GPU has no such memory. Raises ConfigError where ranks need it."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if not cuda_memory.can_share(device.index or 0):
        if geometry.shard != WHOLE:
            raise ConfigError("--tp and --pp need GPUs whose memory can be shared between processes")
        logger.info("this GPU's memory cannot be shared with other processes: KV is staged in host memory")
        return None
    try:
        return shareable_pool(geometry, device)
    except ConfigError as error:
        raise ConfigError(f"{error}: {describe_out_of_memory()}") from error


def shareable_pool(geometry: PoolGeometry, device: torch.device) -> tuple[Tensor, int]:
    """A zeroed pool in memory that other processes can map, and a descriptor of it, which the caller closes.

    It lives as long as the process. Raises ConfigError when the memory is not there.
    """
    torch.cuda.empty_cache()  # this memory is not torch's, which would free what it caches by itself
    memory, fd = cuda_memory.create(device.index or 0, geometry.pool_bytes)
    pool = pool_over_device(memory, geometry, device)
    pool.view(torch.uint8).zero_()
    return pool, fd


def pool_over_device(memory: CudaMemory, geometry: PoolGeometry, device: torch.device) -> Tensor:
    """The pool as a view of mapped memory, see PoolGeometry."""
    flat = tensor_over(memory, device).view(TORCH_DTYPES[geometry.dtype])
    return flat.view(geometry.num_blocks, *geometry.block_shape)


def pool_of_rank(geometry: PoolGeometry, device: torch.device, fd: int) -> Tensor:
    """The pool of another rank, which has handed out a descriptor of it."""
    memory = cuda_memory.attach(device.index or 0, fd, geometry.pool_bytes, writable=True)
    return pool_over_device(memory, geometry, device)
