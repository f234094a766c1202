"""Pinned host memory, which a GPU copies to and from directly.

A copy from pageable memory waits for all queued work, so the host would be idle while the previous step runs. Copies
through pinned memory are asynchronous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

PIECE_BYTES = 64 << 20  # of device memory that copies to and from host slots go through
NUM_PIECES = 2  # one on its way, one being filled
NUMPY_TYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16, torch.float32: np.float32}


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy a list or array to the device, in stream order, without waiting."""
    host = torch.from_numpy(np.asarray(values, NUMPY_TYPES[dtype]))  # of lists in a third of torch's own time
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def download(values: Tensor) -> Tensor:
    """Copy a tensor to pinned host memory, without waiting: it is valid when the stream gets there."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return host.copy_(values, non_blocking=True)
