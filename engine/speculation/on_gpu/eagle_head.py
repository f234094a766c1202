"""An EAGLE-3 head on a GPU: it takes K and V of every token inside of the model's steps, and drafts in graphs.

Its K and V lie in blocks of the model's own numbers, in a pool of one layer: so a prefix that the model finds in its
cache the head finds, too. Drafts are ahead of the blocks that a request has; what does not fit into its last one goes
to a spare block of its row. Blocks that come from elsewhere hold nothing that the head could use.

`engine/speculation/eagle/head.py` says what the layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.gpu.attention.backend import GpuInputs
from engine.gpu.sampling.device_sampler import DeviceSampler
from engine.gpu.steps.state import DeviceState
from engine.layers.rotary import rotary_table
from engine.speculation.eagle.head import HeadShape, HeadWeights
from kernels.gpu.attention.kv_splits import DecodeWorkspace
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.elementwise.rms_norm import add_rms_norm, rms_norm
from kernels.gpu.elementwise.rope import rope_and_write_kv
from kernels.gpu.elementwise.silu_mul import silu_mul

POSITION, ROW, INDEX, BLOCKS = range(4)  # of what `begin` is given
NUM_FIELDS = BLOCKS + 1


class GpuEagleHead:
    """See `Observer`, whose part it is in the model's steps."""

    def __init__(
        self, shape: HeadShape, weights: HeadWeights, num_blocks: int, block_size: int, max_rows: int,
        max_tokens: int, max_model_len: int, hidden_size: int, vocab_size: int,
    ) -> None:  # fmt: skip
        """num_blocks: of the model's pool. max_rows, max_tokens: of a step. hidden_size, vocab_size: the model's."""
        self._shape, self._weights, self._vocab_size = shape, weights, vocab_size
        self.layers = tuple(sorted(set(shape.layers)))
        self._order = [self.layers.index(layer) for layer in shape.layers]
        self._block_size, self._first_spare = block_size, num_blocks
        device, dtype = weights.norm.device, weights.norm.dtype
        self._read = torch.zeros(len(self.layers), max_tokens, hidden_size, dtype=dtype, device=device)
        kv = num_blocks + max_rows, 1, 2, shape.num_kv_heads, block_size, shape.head_dim
        self._pool = torch.zeros(kv, dtype=dtype, device=device)
        num_positions = max_model_len + block_size
        table_dtype = torch.float32 if device.type == "cpu" else dtype
        self._rotary = rotary_table(shape.rope, shape.head_dim, num_positions, table_dtype, device)
        self._workspace = DecodeWorkspace(max_rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, device)
        # Of the rows that are drafted for: the last token, what the layer reads next to it, the position of that.
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(max_rows, shape.hidden_size, dtype=dtype, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._rows = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._tables: Tensor | None = None

    # -- in the model's steps --------------------------------------------------------------------------------

    def see(self, number: int, residual: Tensor) -> None:
        """See Observer."""
        self._read[number, : residual.shape[0]].copy_(residual)

    def take(self, inputs: GpuInputs, next_ids: Tensor) -> None:
        """See Observer. Positions behind a wrong draft are taken again, with what was sampled there."""
        num_tokens, shape = next_ids.shape[0], self._shape
        joined = self._joined(self._read[:, :num_tokens])
        kv = self._weights.kv(self._inputs(next_ids.clamp(min=0), joined)).view(num_tokens, -1, shape.head_dim)
        self._store(kv, inputs.positions[:num_tokens], inputs.groups[0].slots[:num_tokens])

    # -- drafting --------------------------------------------------------------------------------------------

    def begin(self, fields: Tensor, state: DeviceState) -> None:
        """Prepare passes for n rows, from the model's last step.

        fields: int32 (4, n): positions of the last tokens that the model computed, -1 of padding; rows on the device;
        indices of these tokens in the step; blocks that the rows have.
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
        """Compute a pass. Returns a draft for each row, int64 (num_rows,): negative where there is none."""
        assert self._tables is not None, "`begin` comes first"
        held, shape = self._weights, self._shape
        positions, hidden, tables = self._positions[:num_rows], self._hidden[:num_rows], self._tables[:num_rows]
        # First, as kernels below read these before the one that runs ahead of them has ended.
        in_use, known, lengths = positions >= 0, positions.clamp(min=0), positions + 1
        blocks = tables.gather(1, (known // self._block_size).long()[:, None])[:, 0]
        slots = torch.where(in_use, blocks * self._block_size + known % self._block_size, -1)
        inputs = self._inputs(self._tokens[:num_rows], hidden)
        qkv = torch.cat([held.q(inputs), held.kv(inputs)], dim=-1).view(num_rows, -1, shape.head_dim)
        self._store(qkv, known, slots)
        attended = paged_decode(qkv[:, : shape.num_heads], self._pool, 0, tables, lengths, self._workspace)
        residual = inputs[:, shape.hidden_size :].contiguous() if shape.norms_residual else hidden.clone()
        normed = add_rms_norm(held.output(attended), residual, held.mlp_norm, shape.eps)
        final = add_rms_norm(held.down(silu_mul(held.gate_up(normed))), residual, held.norm, shape.eps)
        drafts = sampler.sample(self._whole(held.head(final)), self._rows[:num_rows], positions + 2, is_whole=True)
        self._hidden[:num_rows] = residual
        self._tokens[:num_rows] = drafts.clamp(min=0)
        self._positions[:num_rows] = torch.where(in_use, positions + 1, positions)
        return drafts

    def _joined(self, read: Tensor) -> Tensor:
        """f (n, hidden) of what layers have made of n tokens."""
        return self._weights.fc(torch.cat([read[index] for index in self._order], dim=-1))

    def _inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        held, eps = self._weights, self._shape.eps
        embedded = functional.embedding(token_ids, held.embedding)
        return torch.cat([rms_norm(embedded, held.input_norm, eps), rms_norm(hidden, held.hidden_norm, eps)], dim=-1)

    def _store(self, heads: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Rotate q, if it is there, and K in place; store K and V."""
        rope_and_write_kv(heads, self._rotary, positions, slots, None, 0.0, self._pool, 0)

    def _whole(self, logits: Tensor) -> Tensor:
        """Logits over the model's tokens: noise belongs to their ids."""
        own_ids = self._weights.token_ids
        if own_ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self._vocab_size), float("-inf"))
        whole[:, own_ids] = logits
        return whole


class HeadGraphs:
    """`begin` and `draft` as CUDA graphs, for numbers of rows; without `capture` they run eagerly."""

    def __init__(
        self,
        head: GpuEagleHead,
        state: DeviceState,
        sampler: DeviceSampler,
        buckets: Sequence[int],
        device: torch.device,
    ) -> None:
        self._head, self._state, self._sampler, self._buckets = head, state, sampler, buckets
        self.device = device
        self._fields = torch.zeros(NUM_FIELDS, buckets[-1], dtype=torch.int32, device=device)
        self._begin: dict[int, Callable[[], object]] = {}
        self._draft: dict[int, tuple[Callable[[], object], Tensor]] = {}

    def begin(self, num_rows: int, fields: Tensor) -> None:
        """See GpuEagleHead. fields: on the host, pinned; of a bucket's number of rows."""
        self._fields[:, :num_rows].copy_(fields, non_blocking=True)
        if num_rows in self._begin:
            self._begin[num_rows]()
        else:
            self._head.begin(self._fields[:, :num_rows], self._state)

    def draft(self, num_rows: int) -> Tensor:
        """See GpuEagleHead. The result is overwritten by the next pass."""
        if num_rows not in self._draft:
            return self._head.draft(num_rows, self._sampler)
        replay, drafts = self._draft[num_rows]
        replay()
        return drafts

    def capture(self) -> None:
        """Capture graphs of all numbers of rows."""
        pool = torch.cuda.graph_pool_handle()
        self._fields.zero_()
        self._fields[POSITION] = -1  # nobody's rows
        for num_rows in sorted(self._buckets, reverse=True):
            self._head.begin(self._fields[:, :num_rows], self._state)  # compiles kernels, chooses algorithms
            self._head.draft(num_rows, self._sampler)
            torch.cuda.synchronize()
            begin, draft = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(begin, pool=pool):
                self._head.begin(self._fields[:, :num_rows], self._state)
            with torch.cuda.graph(draft, pool=pool):
                drafts = self._head.draft(num_rows, self._sampler)
            self._begin[num_rows] = begin.replay
            self._draft[num_rows] = draft.replay, drafts
