"""Hidden states between the GPUs of two pipeline stages: NCCL, a communicator for each pair of neighbours.

Where stages have several ranks, each sends to its peer of the next stage: all of them have the same hidden states.

They travel between the graphs of the two stages, not in them: one message a step, as long as its tokens need. A stage
copies what it sends, so that its next step does not wait until the next stage takes this one.
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

BEFORE, BEHIND = 0, 1  # ranks of a pair
TIMEOUT = timedelta(minutes=10)  # of one message: the stage before may compile its kernels first


class NcclSource:
    """See HiddenSource."""

    def __init__(self, store: Path, device: torch.device) -> None:
        """Wait until the other has come, which opens the same store."""
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
            self._sent[self._turn].wait()  # the stream does, until the buffer is free
        buffer = self._buffers[self._turn][: hidden.shape[0]]
        buffer.copy_(hidden)
        self._sent[self._turn] = self._nccl.send([buffer], BEHIND, 0)


class NoNeighbour:
    """Stands in for both while a stage measures its memory."""

    def receive(self, hidden: Tensor) -> None:
        """Leave `hidden` as it is."""

    def send(self, hidden: Tensor) -> None:
        """Send it nowhere."""


Ends = tuple[HiddenSource | None, HiddenSink | None]
"""The stages before and after this one, None where there is none."""


def open_ends(loaded: LoadedModel, config: EngineConfig, folder: Path) -> Ends:
    """Connect a stage with its neighbours, if it has any. folder: of all ranks of the model."""
    first, stop = loaded.shard.layers or (0, loaded.config.num_layers)
    source = sink = None
    if first > 0:
        source = NcclSource(_store_in(folder, first, loaded.shard), loaded.device)
    if stop < loaded.config.num_layers:
        sink = NcclSink(_store_in(folder, stop, loaded.shard), loaded, most_tokens(config), config.pp + 1)
    torch.cuda.synchronize(loaded.device)
    return source, sink


def ends_alone(loaded: LoadedModel) -> Ends:
    """The ends of a stage that is run by itself; none of a whole model."""
    first, stop = loaded.shard.layers or (0, loaded.config.num_layers)
    return NoNeighbour() if first else None, NoNeighbour() if stop < loaded.config.num_layers else None


def stage_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """Memory that the connections of a stage take on its GPU; 0 of a whole model."""
    source, sink = ends_alone(loaded)
    row_bytes = loaded.config.hidden_size * loaded.dtype.itemsize
    sent = (config.pp + 1) * most_tokens(config) * row_bytes
    return (NCCL_BYTES if source else 0) + (NCCL_BYTES + sent if sink else 0)


def _store_in(folder: Path, layer: int, shard: Shard) -> Path:
    """Name the file where a rank of the stage that begins with `layer` meets its peer of the one before."""
    return folder / f"hidden-of-layer-{layer}-{shard.rank}"


def _open_pair(store: Path, rank: int) -> Any:
    nccl = open_nccl(store, rank, 2, TIMEOUT, goes_first=True)
    keep_group(nccl)
    return nccl
