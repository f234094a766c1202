"""Attention of models with KV groups on a CPU: straight from the pool, from the first key in a window on.

Rows of one query attend together, over tables padded to the longest; chunks one after the other.

Which blocks a group's layers read is `BlockGroups`' to say; entries of tables before those are never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cpu.batch import StepBatch
from engine.kv.block_groups import BlockGroups, group_table
from engine.layers.attention import AttentionBlock
from engine.layers.rotary import Rotation
from kernels.paged_attention import attend_causally, attend_rows, gather_kv, gather_rows, write_kv
from kvstore.layout import PoolGeometry
from kvstore.types import BlockId


@dataclass(slots=True)
class GroupRow:
    """One row: its queries among the step's tokens, and the blocks of the last `num_keys` tokens of its sequence."""

    start: int
    stop: int
    block_ids: Tensor
    num_keys: int


@dataclass(slots=True)
class SingleQueries:
    """Rows of one query: which of the step's tokens, their blocks (n, m), and keys (n, m * block_size) not to see."""

    tokens: Tensor
    block_ids: Tensor
    hidden: Tensor


@dataclass(slots=True)
class GroupMetadata:
    """What one group's layers need of a step: where each new token goes, and what rows read."""

    rotation: Rotation
    block_ids: Tensor  # (num_tokens,)
    offsets: Tensor  # (num_tokens,)
    rows: list[GroupRow]
    singles: SingleQueries | None


class GroupedAttention:
    """The backend for pools of K and V whose blocks belong to groups of layers."""

    def __init__(
        self, pool: Tensor, geometry: PoolGeometry, rotary: Tensor, local_rotary: Tensor | None = None
    ) -> None:
        """geometry: of the pool, whatever its number of blocks.

        rotary: see `rotary_table`; local_rotary: of layers with a window, None: the same.
        """
        self._pool, layout, here = pool, geometry.layout, geometry.layers
        self._groups = BlockGroups.of(layout, pool.shape[4], step_tokens=0)
        self._tables = [
            local_rotary if group.window and local_rotary is not None else rotary for group in layout.groups
        ]
        self._places = {  # by a layer's number among those of this pool
            layer - here.start: (group, index)
            for group, layers in enumerate(each.layers for each in layout.groups)
            for index, layer in enumerate(layer for layer in layers if layer in here)
        }

    def plan(self, batch: StepBatch, inputs: Tensor) -> list[GroupMetadata]:
        """Metadata of each group. Blocks are taken from the requests' tables, not from `inputs`."""
        rotations: dict[int, Rotation] = {}
        planned = []
        for group, table in enumerate(self._tables):
            if id(table) not in rotations:
                rotations[id(table)] = Rotation.of(table, inputs[1])
            planned.append(self._plan_group(group, batch, inputs, rotations[id(table)]))
        return planned

    def _plan_group(self, group: int, batch: StepBatch, inputs: Tensor, rotation: Rotation) -> GroupMetadata:
        groups, block_size = self._groups, self._groups.block_size
        rows: list[GroupRow] = []
        singles: list[tuple[int, list[BlockId], int, int]] = []  # token, blocks, the range of keys it sees there
        new_blocks: list[Tensor] = []
        for index, request in enumerate(batch.requests):
            start, stop = batch.query_starts[index], batch.query_starts[index + 1]
            seq_len = batch.seq_lens[index]
            window = groups.windows[group]
            first = groups.first_live(window, seq_len - (stop - start))
            table = group_table(request.block_ids, group, groups.num_groups, first, groups.num_positions(seq_len))
            block_ids = torch.tensor(table, device=self._pool.device)
            new_blocks.append(block_ids[inputs[1][start:stop] // block_size - first])
            num_keys = seq_len - first * block_size
            if stop - start == 1:
                singles.append((start, table, max(num_keys - window, 0) if window else 0, num_keys))
            else:
                rows.append(GroupRow(start, stop, block_ids, num_keys))
        return GroupMetadata(rotation, torch.cat(new_blocks), inputs[3], rows, self._join(singles))

    def _join(self, singles: list[tuple[int, list[BlockId], int, int]]) -> SingleQueries | None:
        if not singles:
            return None
        tokens, tables, starts, stops = zip(*singles, strict=True)
        most, device = max(map(len, tables)), self._pool.device
        padded = [[*table, *table[-1:] * (most - len(table))] for table in tables]
        keys = torch.arange(most * self._groups.block_size, device=device)
        first, end = torch.tensor([starts, stops], device=device)[..., None]
        hidden = (keys < first) | (keys >= end)
        return SingleQueries(torch.tensor(tokens, device=device), torch.tensor(padded, device=device), hidden)

    def attend(self, block: AttentionBlock, qkv: Tensor, metadata: list[GroupMetadata]) -> Tensor:
        """See AttentionBackend."""
        group, index = self._places[block.layer]
        own, window = metadata[group], self._groups.windows[group]
        q, kv = block.heads(qkv, own.rotation)
        write_kv(self._pool, index, kv, own.block_ids, own.offsets)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if own.singles is not None:
            keys, values = block.context(gather_rows(self._pool, index, own.singles.block_ids))
            tokens = own.singles.tokens
            out[tokens] = attend_rows(q[tokens], keys, values, own.singles.hidden, block.sinks)
        for row in own.rows:
            keys, values = block.context(gather_kv(self._pool, index, row.block_ids, row.num_keys))
            out[row.start : row.stop] = attend_causally(q[row.start : row.stop], keys, values, window, block.sinks)
        return block.outputs(out)
