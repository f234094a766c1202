"""Hidden states between the GPUs of two pipeline stages: NCCL, with a communicator per pair of neighbours.

If stages have several ranks, each sends to its peer in the next stage, as all have the same hidden states. They are
sent between the graphs of the two stages, not within them: one message per step, as long as its tokens need. A stage
sends a copy, so that its next step does not wait until the next stage has received this one.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.gpu.steps.rows import most_tokens
from engine.loader.load import LoadedModel
from engine.pipeline_parallel.ends import HiddenSource
from engine.ranks import HiddenSink
from engine.tensor_parallel.gpu_group import NCCL_BYTES, keep_group, open_nccl
from kvstore.layout import Shard

BEFORE, BEHIND = 0, 1  # ranks in a pair
TIMEOUT = timedelta(minutes=10)  # of one message: the previous stage may compile its kernels first


class NcclSource:
    """See HiddenSource."""

    def __init__(self, store: Path, device: torch.device) -> None:
        """Wait until the previous stage has opened the same store."""
        self._nccl = _open_pair(store, BEHIND)
        self.receive(torch.zeros(1, device=device))

    def receive(self, hidden: Tensor) -> None:
        self._nccl.recv([hidden], BEFORE, 0).wait()  # the stream waits, not the host


class NcclSink:
    """See HiddenSink."""

    def __init__(self, store: Path, loaded: LoadedModel, num_tokens: int, num_buffers: int) -> None:
        """num_buffers: more than steps in flight."""
        self._nccl = _open_pair(store, BEFORE)
        shape = num_tokens, loaded.config.hidden_size
        self._buffers = [torch.zeros(shape, dtype=loaded.dtype, device=loaded.device) for _ in range(num_buffers)]
        self._sent: list[Any] = [None] * num_buffers
        self._turn = 0
        self._nccl.send([torch.zeros(1, device=loaded.device)], BEHIND, 0).wait()  # connects while the store exists

    def send(self, hidden: Tensor) -> None:
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._sent[self._turn] is not None:
            self._sent[self._turn].wait()  # the stream waits until the buffer is free
        buffer = self._buffers[self._turn][: hidden.shape[0]]
        buffer.copy_(hidden)
        self._sent[self._turn] = self._nccl.send([buffer], BEHIND, 0)


class NoNeighbour:
    """Stands in for source and sink while a stage measures its memory."""

    def receive(self, hidden: Tensor) -> None:
        """Do nothing with `hidden`."""

    def send(self, hidden: Tensor) -> None:
        """Drop it."""


Ends = tuple[HiddenSource | None, HiddenSink | None]
"""Source and sink of a stage, None where there is no neighbour."""


def open_ends(loaded: LoadedModel, config: EngineConfig, folder: Path) -> Ends:
    """Connect a stage to its neighbours, if any. folder: of all ranks of the model."""
    first, stop = loaded.shard.layers or (0, loaded.config.num_layers)
    source = sink = None
    if first > 0:
        source = NcclSource(_store_in(folder, first, loaded.shard), loaded.device)
    if stop < loaded.config.num_layers:
        sink = NcclSink(_store_in(folder, stop, loaded.shard), loaded, most_tokens(config), config.pp + 1)
    torch.cuda.synchronize(loaded.device)
    return source, sink


def ends_alone(loaded: LoadedModel) -> Ends:
    """Return the ends of a stage that runs alone; none for a whole model."""
    first, stop = loaded.shard.layers or (0, loaded.config.num_layers)
    return NoNeighbour() if first else None, NoNeighbour() if stop < loaded.config.num_layers else None


def stage_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """Return the memory of a stage's connections on its GPU; 0 for a whole model."""
    source, sink = ends_alone(loaded)
    row_bytes = loaded.config.hidden_size * loaded.dtype.itemsize
    sent = (config.pp + 1) * most_tokens(config) * row_bytes
    return (NCCL_BYTES if source else 0) + (NCCL_BYTES + sent if sink else 0)


def _store_in(folder: Path, layer: int, shard: Shard) -> Path:
    """Return the file where a rank of the stage that begins with `layer` meets its peer of the previous one."""
    return folder / f"hidden-of-layer-{layer}-{shard.rank}"


def _open_pair(store: Path, rank: int) -> Any:
    nccl = open_nccl(store, rank, 2, TIMEOUT, goes_first=True)
    keep_group(nccl)
    return nccl
