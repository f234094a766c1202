"""What passes between the GPUs of pipeline stages: NCCL, a communicator for each pair that has something to send.

Neighbours pass hidden states on, and the last stage gives sampled tokens back to the first. Where stages have several
ranks, each sends to its peer of the other stage: all of them have the same hidden states and tokens.

Hidden states travel between the graphs of two stages, not in them: one message a step, as long as its tokens need. A
stage copies what it sends, so that its next step does not wait until the stage behind takes this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.gpu.config import GpuConfig, returns_tokens
from engine.gpu.group import NCCL_BYTES, keep_group, open_nccl
from engine.gpu.inputs import upload
from engine.gpu.rows import most_tokens
from engine.layers.pipeline import StageEnds, TokenReturn
from engine.loader import LoadedModel
from kvstore.layout import Shard

BEFORE, BEHIND = 0, 1  # ranks of a pair, the first stage and the last one where tokens return
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
        """num_buffers: steps that the other may be behind before this stage waits."""
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


class NcclTokenSource:
    """The first stage's end of a TokenReturn."""

    def __init__(self, store: Path, max_rows: int, device: torch.device) -> None:
        self._nccl = _open_pair(store, BEFORE)
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._nccl.recv([self._tokens[:1]], BEHIND, 0).wait()  # connects while the store exists

    def pass_on(self, last_tokens: Tensor, rows: Sequence[int]) -> None:
        if not rows:
            return
        index = upload(rows, torch.int64, last_tokens.device)  # first: the rest of the stream waits for the tokens
        tokens = self._tokens[: len(rows)]
        self._nccl.recv([tokens], BEHIND, 0).wait()
        last_tokens[index] = tokens


class NcclTokenSink:
    """The last stage's end of a TokenReturn, on a stream of its own: the runner's has later steps by then."""

    def __init__(self, store: Path, max_rows: int, num_stages: int, device: torch.device) -> None:
        self._nccl = _open_pair(store, BEHIND)
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._ends: deque[Any] = deque(maxlen=num_stages)  # of the last steps, on the runner's stream
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._sent = self._nccl.send([self._tokens[:1]], BEFORE, 0)  # connects while the store exists

    def pass_on(self, last_tokens: Tensor, rows: Sequence[int]) -> None:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._ends.append(event)
        if not rows:
            return
        tokens = self._tokens[: len(rows)]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ends[0])
            self._sent.wait()  # this stream does, until the tokens before are gone
            torch.index_select(last_tokens, 0, upload(rows, torch.int64, last_tokens.device), out=tokens)
            self._sent = self._nccl.send([tokens], BEFORE, 0)


class NoNeighbour:
    """Stands in for both while a stage measures its memory."""

    def receive(self, hidden: Tensor) -> None:
        """Leave `hidden` as it is."""

    def send(self, hidden: Tensor) -> None:
        """Send it nowhere."""


def open_ends(loaded: LoadedModel, config: EngineConfig, gpu: GpuConfig, folder: Path) -> StageEnds:
    """Connect a stage with the others, if there are any. folder: of all ranks of the model."""
    first, stop = loaded.shard.layers or (0, loaded.config.num_layers)
    source = sink = None
    tokens: TokenReturn | None = None
    if first > 0:
        source = NcclSource(_store_in(folder, first, loaded.shard), loaded.device)
    if stop < loaded.config.num_layers:
        sink = NcclSink(_store_in(folder, stop, loaded.shard), loaded, most_tokens(config), config.pp + 1)
    if returns_tokens(config, gpu):
        store = folder / f"tokens-{loaded.shard.rank}"
        if source is None:
            tokens = NcclTokenSource(store, config.max_num_seqs, loaded.device)
        elif sink is None:
            tokens = NcclTokenSink(store, config.max_num_seqs, config.pp, loaded.device)
    torch.cuda.synchronize(loaded.device)
    return StageEnds(source, sink, tokens=tokens)


def ends_alone(loaded: LoadedModel) -> StageEnds:
    """The ends of a stage that is run by itself; none of a whole model."""
    if loaded.shard.layers is None:
        return StageEnds()
    first, stop = loaded.shard.layers
    return StageEnds(NoNeighbour() if first else None, NoNeighbour() if stop < loaded.config.num_layers else None)


def stage_bytes(loaded: LoadedModel, config: EngineConfig, gpu: GpuConfig) -> int:
    """Memory that the connections of a stage take on its GPU; 0 of a whole model."""
    ends = ends_alone(loaded)
    num_pairs = sum(1 for end in (ends.source, ends.sink) if end is not None)
    if num_pairs == 1 and returns_tokens(config, gpu):
        num_pairs = 2
    row_bytes = loaded.config.hidden_size * loaded.dtype.itemsize
    sent = (config.pp + 1) * most_tokens(config) * row_bytes if ends.sink else 0
    return num_pairs * NCCL_BYTES + sent


def _store_in(folder: Path, layer: int, shard: Shard) -> Path:
    """Name the file where a rank of the stage that begins with `layer` meets its peer of the one before."""
    return folder / f"hidden-of-layer-{layer}-{shard.rank}"


def _open_pair(store: Path, rank: int) -> Any:
    nccl = open_nccl(store, rank, 2, TIMEOUT, goes_first=True)
    keep_group(nccl)
    return nccl
