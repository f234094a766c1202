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

TIMEOUT = timedelta(minutes=10)  # of one collective: a prompt's step on a slow CPU, with a rank that was paused
_dist: Any = torch.distributed  # its process groups have no type annotations


def store_in(folder: Path, shard: Shard) -> Path:
    """Name the file, which does not exist yet, where a stage's ranks meet. folder: of all ranks of the model."""
    return folder / f"ranks-of-layer-{shard.layers[0] if shard.layers else 0}"


class GlooGroup:
    """A `Group`. Any failure is final, since ranks may then be at different places."""

    def __init__(self, shard: Shard, folder: Path) -> None:
        """Wait until all ranks have come. folder: see `store_in`."""
        self.rank, self.size = shard.rank, shard.size
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        store = _dist.FileStore(str(store_in(folder, shard)), self.size)
        self._group = _dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._group.allreduce([total]).wait()
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        mine = x.contiguous().view(torch.uint8)  # gloo does not support every dtype
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._group.allgather([parts], [mine]).wait()
        return torch.cat([part.view(x.dtype) for part in parts], dim=-1)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out = torch.empty(sum(receive), x.shape[1], dtype=x.dtype)
        mine, theirs = x.contiguous().view(torch.uint8), out.view(torch.uint8)
        self._group.alltoall_base(theirs, mine, list(receive), list(send)).wait()
        return out
