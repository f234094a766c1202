"""CUDA memory that is not torch's, as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.transport.cuda_memory import CudaMemory


class DeviceMemoryView:
    """A CUDA mapping as torch.as_tensor takes it: bytes without an owner."""

    def __init__(self, memory: CudaMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3
        }  # fmt: skip


def tensor_over(memory: CudaMemory, device: torch.device) -> Tensor:
    """The mapping as uint8 (num_bytes,). Valid until the mapping is closed."""
    return torch.as_tensor(DeviceMemoryView(memory), device=device)
