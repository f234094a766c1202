"""Host slots as a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def host_buffer_over(buffer: Any, num_slots: int, block_bytes: int) -> Tensor:
    """Host slots uint8 [num_slots, block_bytes] as a view of a writable buffer."""
    return torch.frombuffer(buffer, dtype=torch.uint8, count=num_slots * block_bytes).view(num_slots, block_bytes)
