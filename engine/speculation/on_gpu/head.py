"""A head of one layer on a GPU: it stores K and V of every token within the model's steps, and drafts in CUDA graphs.

Its K and V, or latents, are in a pool of one layer with the model's block ids, so a prefix that hits the model's
cache has the head's KV, too. Drafts may run past a request's blocks; these go to a spare block of the row. Blocks
that came from a peer or another tier have no KV of the head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.gpu.attention.backend import GpuInputs
from engine.gpu.ops.rules import GpuForward
from engine.gpu.steps.device_sampler import DeviceSampler
from engine.gpu.steps.rows import DeviceState
from engine.models.model import Model
from engine.speculation.heads.watching import watched

POSITION, ROW, INDEX, BLOCKS = range(4)  # fields of `begin`
NUM_FIELDS = BLOCKS + 1


@dataclass(frozen=True, slots=True)
class HeadSize:
    """num_blocks: of the model's pool. max_rows, max_tokens: of a step. model_size: the model's hidden size."""

    num_blocks: int
    block_size: int
    max_rows: int
    max_tokens: int
    max_model_len: int
    model_size: int


class GpuHead(ABC):
    """Takes part in the model's steps as an `Observer`.

    kv: planes, KV heads and head dimension of a token's KV. hidden_size: of the head, in its `dtype`.
    """

    def __init__(
        self, layers: Sequence[int], size: HeadSize, kv: tuple[int, int, int], hidden_size: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.layers = tuple(layers)
        self._block_size, self._first_spare = size.block_size, size.num_blocks
        self._read = torch.zeros(len(self.layers), size.max_tokens, size.model_size, dtype=dtype, device=device)
        planes, num_heads, head_dim = kv
        blocks = size.num_blocks + size.max_rows, 1, planes, num_heads, size.block_size, head_dim
        self._pool = torch.zeros(blocks, dtype=dtype, device=device)
        # For the rows to draft for: the last token, the hidden state that the layer reads with it, and its position.
        self._tokens = torch.zeros(size.max_rows, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(size.max_rows, hidden_size, dtype=dtype, device=device)
        self._positions = torch.zeros(size.max_rows, dtype=torch.int32, device=device)
        self._rows = torch.zeros(size.max_rows, dtype=torch.int64, device=device)
        self._tables: Tensor | None = None

    # -- in the model's steps --------------------------------------------------------------------------------

    def watch(self, forward: GpuForward, model: Model) -> GpuForward:
        """See Observer."""
        return watched(forward, model, self.layers, self._see)

    def _see(self, number: int, residual: Tensor) -> None:
        self._read[number, : residual.shape[0]].copy_(residual)

    def take(self, inputs: GpuInputs, sampled: Tensor, last: Tensor | None, lengths: Tensor | None) -> None:
        """See Observer. Positions after a wrong draft are stored again, with the tokens sampled there."""
        next_ids = following(inputs.token_ids, sampled, last, lengths)
        num_tokens = next_ids.shape[0]
        x = self._inputs(next_ids.clamp(min=0), self._joined(self._read[:, :num_tokens]))
        self._keep(x, inputs.positions[:num_tokens], inputs.groups[0].slots[:num_tokens])

    # -- drafting --------------------------------------------------------------------------------------------

    def begin(self, fields: Tensor, state: DeviceState) -> None:
        """Prepare the passes for n rows, after the model's step.

        fields: int32 (4, n): positions of the last tokens that the model computed, -1 for padding; device rows;
        indices of these tokens in the step; numbers of blocks.
        """
        n, rows = fields.shape[1], fields[ROW].long()
        if self._tables is None:
            self._tables = torch.zeros(self._tokens.shape[0], state.block_tables[0].shape[1] + 1,
                                       dtype=torch.int32, device=fields.device)  # fmt: skip
        self._tokens[:n] = state.last_tokens[rows]
        self._hidden[:n] = self._joined(self._read[:, fields[INDEX].long()])
        self._positions[:n] = fields[POSITION]
        self._rows[:n] = rows
        numbers = torch.arange(self._tables.shape[1], device=fields.device)
        own = functional.pad(state.block_tables[0][rows], (0, 1))
        self._tables[:n] = torch.where(
            numbers < fields[BLOCKS, :, None], own, self._first_spare + fields[ROW, :, None]
        )

    def draft(self, num_rows: int, sampler: DeviceSampler) -> Tensor:
        """Compute a pass. Returns a draft for each row, int64 (num_rows,), negative if there is none."""
        assert self._tables is not None, "`begin` comes first"
        positions, hidden, tables = self._positions[:num_rows], self._hidden[:num_rows], self._tables[:num_rows]
        # First, since kernels with programmatic dependent launch read these before their predecessor has ended.
        in_use, known, lengths = positions >= 0, positions.clamp(min=0), positions + 1
        blocks = tables.gather(1, (known // self._block_size).long()[:, None])[:, 0]
        slots = torch.where(in_use, blocks * self._block_size + known % self._block_size, -1)
        x = self._inputs(self._tokens[:num_rows], hidden)
        outputs, logits = self._pass(x, hidden, known, slots, tables, lengths)
        drafts = sampler.sample(logits, self._rows[:num_rows], positions + 2, is_whole=True)
        self._hidden[:num_rows] = outputs
        self._tokens[:num_rows] = drafts.clamp(min=0)
        self._positions[:num_rows] = torch.where(in_use, positions + 1, positions)
        return drafts

    @abstractmethod
    def _joined(self, read: Tensor) -> Tensor:
        """Compute f (n, hidden) from the model's residuals of n tokens, (layers, n, model's hidden)."""

    @abstractmethod
    def _inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Compute the layer's inputs (n, in), see `Head`."""

    @abstractmethod
    def _keep(self, x: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store K and V of the inputs. slots: int32 (n,), -1 to store nothing."""

    @abstractmethod
    def _pass(
        self, x: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute o (n, hidden) and logits (n, model's vocab) for inputs, one per row. hidden: f of each, not
        changed.

        tables, lengths: of the rows' keys, these included, as for `paged_decode`.
        """


def following(token_ids: Tensor, sampled: Tensor, last: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Return the tokens that follow those of a step, int64 (num_tokens,), negative if there is none. See
    `Observer.take`.

    token_ids: of the step.
    """
    if last is None:
        return sampled
    num_tokens = token_ids.shape[0]
    next_ids = torch.cat([token_ids[1:], token_ids.new_zeros(2)])
    next_ids[last if lengths is None else torch.where(lengths > 0, last, num_tokens)] = sampled
    return next_ids[:num_tokens]


class HeadGraphs:
    """`begin` and `draft` as CUDA graphs for each bucket of rows; without `capture` they run eagerly."""

    def __init__(
        self,
        head: GpuHead,
        state: DeviceState,
        sampler: DeviceSampler,
        buckets: Sequence[int],
        device: torch.device,
    ) -> None:
        self._head, self._state, self._sampler, self._buckets = head, state, sampler, buckets
        self.device = device
        self._fields = torch.zeros(NUM_FIELDS, buckets[-1], dtype=torch.int32, device=device)
        self.num_groups = len(state.block_tables)  # the head uses the blocks of the first, which sees all tokens
        self._begin: dict[int, Callable[[], object]] = {}
        self._draft: dict[int, tuple[Callable[[], object], Tensor]] = {}

    def begin(self, num_rows: int, fields: Tensor) -> None:
        """See GpuHead. fields: pinned host memory, padded to a bucket."""
        self._fields[:, :num_rows].copy_(fields, non_blocking=True)
        if num_rows in self._begin:
            self._begin[num_rows]()
        else:
            self._head.begin(self._fields[:, :num_rows], self._state)

    def draft(self, num_rows: int) -> Tensor:
        """See GpuHead. The result is overwritten by the next pass."""
        if num_rows not in self._draft:
            return self._head.draft(num_rows, self._sampler)
        replay, drafts = self._draft[num_rows]
        replay()
        return drafts

    def capture(self) -> None:
        """Capture graphs for all buckets."""
        pool = torch.cuda.graph_pool_handle()
        self._fields.zero_()
        self._fields[POSITION] = -1  # all rows are padding
        for num_rows in sorted(self._buckets, reverse=True):
            self._head.begin(self._fields[:, :num_rows], self._state)  # compiles kernels and chooses algorithms
            self._head.draft(num_rows, self._sampler)
            torch.cuda.synchronize()
            begin, draft = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(begin, pool=pool):
                self._head.begin(self._fields[:, :num_rows], self._state)
            with torch.cuda.graph(draft, pool=pool):
                drafts = self._head.draft(num_rows, self._sampler)
            self._begin[num_rows] = begin.replay
            self._draft[num_rows] = draft.replay, drafts
