"""Host memory that a GPU copies to and from directly."""

from __future__ import annotations

import weakref

import torch

from common.errors import ConfigError

READ_ONLY = 8  # cudaHostRegisterReadOnly


def pin(memory: torch.Tensor, is_read_only: bool = False) -> None:
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
