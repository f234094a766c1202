"""Collectives of a tensor-parallel group on one host's CPUs: gloo over loopback."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from kvstore.layout import Shard

TIMEOUT = timedelta(minutes=10)  # of one collective: a prompt's step on a slow CPU, with a rank that was stopped
_dist: Any = torch.distributed  # its process groups have no annotations


class GlooGroup:
    """A `Group`. Any failure is final: ranks may be at different places after it."""

    def __init__(self, shard: Shard, store: Path) -> None:
        """store: a file that does not exist yet, the same for all ranks. Waits until all have come."""
        self.rank, self.size = shard.rank, shard.size
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        self._group = _dist.ProcessGroupGloo(_dist.FileStore(str(store), self.size), self.rank, self.size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Group."""
        total = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._group.allreduce([total]).wait()
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """See Group."""
        mine = x.contiguous().view(torch.uint8)  # gloo does not know every type
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._group.allgather([parts], [mine]).wait()
        return torch.cat([part.view(x.dtype) for part in parts], dim=-1)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See Group."""
        out = torch.empty(sum(receive), x.shape[1], dtype=x.dtype)
        mine, theirs = x.contiguous().view(torch.uint8), out.view(torch.uint8)
        self._group.alltoall_base(theirs, mine, list(receive), list(send)).wait()
        return out
