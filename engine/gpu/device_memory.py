"""CUDA memory that is not torch's, as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kv.memory import TORCH_DTYPES
from kvstore.layout import PoolGeometry
from kvstore.transports.cuda_ipc import cuda_memory
from kvstore.transports.cuda_ipc.cuda_memory import CudaMemory


class DeviceMemoryView:
    """A CUDA mapping as torch.as_tensor takes it: bytes without an owner."""

    def __init__(self, memory: CudaMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3
        }  # fmt: skip


def tensor_over(memory: CudaMemory, device: torch.device) -> Tensor:
    """The mapping as uint8 (num_bytes,). Valid until the mapping is closed."""
    return torch.as_tensor(DeviceMemoryView(memory), device=device)


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
