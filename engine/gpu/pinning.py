"""Host memory that a GPU copies to and from directly."""

from __future__ import annotations

import torch

from common.errors import ConfigError


def pin(memory: torch.Tensor) -> None:
    """Register `memory`, which stays where it is, with the driver. Raises ConfigError when that refuses."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        raise ConfigError(
            f"the driver does not pin {memory.numel() / 1e9:.2f} GB of host memory: lower --kv-staging-gb or "
            "--host-tier-gb"
        )
