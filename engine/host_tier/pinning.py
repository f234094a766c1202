"""Pins host memory that exists already: host slots, staging rows, pools of peers."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from common.errors import ConfigError

READ_ONLY = 8  # cudaHostRegisterReadOnly


def pin(memory: Tensor, is_read_only: bool = False) -> None:
    """Register `memory` with the driver, without moving it, for as long as this tensor object lives.

    is_read_only: the memory is mapped read-only. Raises ConfigError when the driver refuses.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), READ_ONLY if is_read_only else 0)
    if int(status) != 0:
        raise ConfigError(
            f"the driver does not pin {memory.numel() / 1e9:.2f} GB of host memory: lower --kv-staging-gb or "
            "--host-tier-gb"
        )
    # Other memory may be mapped at this address later, which the driver must not take for this one.
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
