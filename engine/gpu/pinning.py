"""Host memory that a GPU copies to and from directly.

A copy from pageable memory waits for everything that the device has been given: the host would be idle while the step
before runs. So what goes to the device goes through pinned memory, and nobody waits for it.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError

PIECE_BYTES = 64 << 20  # of device memory that copies to and from host slots go through
NUM_PIECES = 2  # one on its way, one being filled
READ_ONLY = 8  # cudaHostRegisterReadOnly
NUMPY_TYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16, torch.float32: np.float32}


def pin(memory: Tensor, is_read_only: bool = False) -> None:
    """Register `memory`, which stays where it is, with the driver, for as long as this tensor object lives.

    is_read_only: it is mapped so. Raises ConfigError when the driver refuses.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), READ_ONLY if is_read_only else 0)
    if int(status) != 0:
        raise ConfigError(
            f"the driver does not pin {memory.numel() / 1e9:.2f} GB of host memory: lower --kv-staging-gb or "
            "--host-tier-gb"
        )
    # What is mapped at this address later is other memory: the driver must not take it for this one.
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list or array on the device, in stream order; the host goes on at once."""
    host = torch.from_numpy(np.asarray(values, NUMPY_TYPES[dtype]))  # of lists in a third of torch's own time
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def download(values: Tensor) -> Tensor:
    """The tensor in pinned host memory, valid when the stream has come so far."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return host.copy_(values, non_blocking=True)
