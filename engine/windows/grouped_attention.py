"""Attention of models with KV groups on a CPU: directly from the pool, from the first key in the window on.

Generated tokens whose keys fill equally many steps of KEY_STEP attend together, chunks one by one. The shape of every
GEMM depends on a token's position alone, so that its bits do not depend on the rest of the step.

`WindowedGroups` decides which blocks a group's layers read; earlier entries of tables are never used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cpu.batch import StepBatch
from engine.cpu_forms.rows import is_generated
from engine.kv_groups.block_groups import group_table
from engine.layers.attention import AttentionBlock
from engine.layers.rotary import Rotation
from engine.loader.load import LoadedModel
from engine.request_states import RequestState
from engine.windows.block_groups import WindowedGroups
from kernels.aligned_attention import aligned_attention, capped
from kernels.paged_attention import gather_kv, indexable, write_kv
from kvstore.layout import PoolGeometry
from kvstore.types import BlockId

KEY_STEP = 64


@dataclass(slots=True)
class GroupRow:
    """One row: its queries among the step's tokens, and the blocks of the last `num_keys` tokens of its sequence."""

    start: int
    stop: int
    block_ids: Tensor
    num_keys: int
    first_key: int  # position of the first of these keys


@dataclass(slots=True)
class _Single:
    """A generated token: its index in the step, its sequence's blocks, and the range of their keys that it sees."""

    token: int
    table: list[BlockId]
    first_key: int
    num_keys: int


@dataclass(slots=True)
class SingleQueries:
    """Rows of one query: indices of tokens in the step, blocks (n, m), and hidden keys (n, m * block_size)."""

    tokens: Tensor
    block_ids: Tensor
    hidden: Tensor


@dataclass(slots=True)
class GroupMetadata:
    """A step's metadata for one group's layers: where each new token is stored, and what rows read."""

    rotation: Rotation
    block_ids: Tensor  # (num_tokens,)
    offsets: Tensor  # (num_tokens,)
    rows: list[GroupRow]
    singles: list[SingleQueries]


class GroupedAttention:
    """The backend for pools of K and V with several KV groups."""

    name = "groups"

    def __init__(
        self, pool: Tensor, geometry: PoolGeometry, rotary: Tensor, local_rotary: Tensor | None = None
    ) -> None:
        """geometry: of the pool; its number of blocks is not used. rotary: see `rotary_table`. local_rotary: for
        layers with a window; None: the same.
        """
        self._pool, layout, here = pool, geometry.layout, geometry.layers
        self._groups = WindowedGroups.of(layout, pool.shape[4], step_tokens=0)
        self._tables = [
            local_rotary if group.window and local_rotary is not None else rotary for group in layout.groups
        ]
        self._places = {  # by the layer's index in this pool
            layer - here.start: (group, index)
            for group, layers in enumerate(each.layers for each in layout.groups)
            for index, layer in enumerate(layer for layer in layers if layer in here)
        }

    def plan(self, batch: StepBatch, inputs: Tensor) -> list[GroupMetadata]:
        """Return the metadata of each group. Blocks come from the requests' tables, not from `inputs`."""
        rotations: dict[int, Rotation] = {}
        planned = []
        for group, table in enumerate(self._tables):
            if id(table) not in rotations:
                rotations[id(table)] = Rotation.of(table, inputs[1])
            planned.append(self._plan_group(group, batch, inputs, rotations[id(table)]))
        return planned

    def _plan_group(self, group: int, batch: StepBatch, inputs: Tensor, rotation: Rotation) -> GroupMetadata:
        groups, block_size = self._groups, self._groups.block_size
        window = groups.windows[group]
        rows: list[GroupRow] = []
        singles: dict[int, list[_Single]] = {}  # by the padded number of keys
        new_blocks: list[Tensor] = []
        for index, request in enumerate(batch.requests):
            start, stop = batch.query_starts[index], batch.query_starts[index + 1]
            seq_len = batch.seq_lens[index]
            first = groups.first_live(window, seq_len - (stop - start))
            table = group_table(request.block_ids, group, groups.num_groups, first, groups.num_positions(seq_len))
            block_ids = torch.tensor(table, device=self._pool.device)
            new_blocks.append(block_ids[inputs[1][start:stop] // block_size - first])
            num_keys = seq_len - first * block_size
            if is_generated(batch.rows[index], request):
                for token, end in enumerate(range(seq_len - (stop - start) + 1, seq_len + 1), start):
                    padded, single = self._single(group, request, token, end)
                    singles.setdefault(padded, []).append(single)
            else:
                rows.append(GroupRow(start, stop, block_ids, num_keys, first * block_size))
        joined = [self._join(padded, each) for padded, each in singles.items()]
        return GroupMetadata(rotation, torch.cat(new_blocks), inputs[3], rows, joined)

    def _single(self, group: int, request: RequestState, token: int, seq_len: int) -> tuple[int, _Single]:
        """Return the padded number of keys, as if it were alone, and the entry of token `seq_len` of a sequence."""
        groups = self._groups
        window, first = groups.windows[group], groups.first_live(groups.windows[group], seq_len - 1)
        table = group_table(request.block_ids, group, groups.num_groups, first, groups.num_positions(seq_len))
        num_keys = seq_len - first * groups.block_size
        first_key = max(num_keys - window, 0) if window else 0
        return -(-num_keys // KEY_STEP) * KEY_STEP, _Single(token, table, first_key, num_keys)

    def _join(self, num_keys: int, singles: list[_Single]) -> SingleQueries:
        """Join tokens with the same padded number of keys."""
        num_blocks, device = -(-num_keys // self._groups.block_size), self._pool.device
        padded = [[*each.table, *each.table[-1:] * (num_blocks - len(each.table))] for each in singles]
        keys = torch.arange(num_blocks * self._groups.block_size, device=device)
        first, end = torch.tensor([[each.first_key, each.num_keys] for each in singles], device=device).T[..., None]
        hidden = (keys < first) | (keys >= end)
        tokens = torch.tensor([each.token for each in singles], device=device)
        return SingleQueries(tokens, torch.tensor(padded, device=device), hidden)

    def attend(self, block: AttentionBlock, qkv: Tensor, metadata: list[GroupMetadata]) -> Tensor:
        group, index = self._places[block.layer]
        own, window = metadata[group], self._groups.windows[group]
        q, kv = block.heads(qkv, own.rotation)
        write_kv(self._pool, index, kv, own.block_ids, own.offsets)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for singles in own.singles:
            keys, values = block.context(gather_rows(self._pool, index, singles.block_ids))
            tokens = singles.tokens
            out[tokens] = attend_rows(q[tokens], keys, values, singles.hidden, block.sinks, block.softcap)
        for row in own.rows:
            kv = gather_kv(self._pool, index, row.block_ids, row.num_keys).to(q.dtype)
            own_queries = slice(row.start, row.stop)
            out[own_queries] = aligned_attention(
                q[own_queries], *block.context(kv), row.first_key, window, block.sinks, block.softcap
            )
        return block.outputs(out)


def gather_rows(pool: Tensor, layer: int, block_ids: Tensor) -> Tensor:
    """Gather sequences of equally many blocks: (n, m) -> (planes, n, num_kv_heads, m * block_size, head_dim)."""
    blocks = indexable(pool)[block_ids, layer].view(pool.dtype)  # (n, m, planes, heads, block_size, head_dim)
    return blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)


def attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, sinks: Tensor | None = None, softcap: float = 0.0
) -> Tensor:
    """Attend with one query per sequence.

    q: (n, num_heads, head_dim); keys and values: (n, num_kv_heads, num_keys, head_dim), values may be modified;
    hidden: bool (n, num_keys), keys that do not take part and may hold anything. Returns the shape of q.
    """
    num_kv_heads = keys.shape[1]
    grouped = q.view(q.shape[0], num_kv_heads, -1, q.shape[2])
    keys, values = keys.to(q.dtype), values.to(q.dtype).masked_fill_(hidden[:, None, :, None], 0)
    scores = capped(torch.matmul(grouped, keys.transpose(2, 3)).float() * q.shape[2] ** -0.5, softcap)
    scores.masked_fill_(hidden[:, None, None], float("-inf"))
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        beside = sinks.float().view(1, num_kv_heads, -1, 1).expand(q.shape[0], -1, -1, 1)
        weights = torch.cat([scores, beside], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values).view(q.shape)


def attention_for(loaded: LoadedModel, kv_pool: Tensor, geometry: PoolGeometry) -> GroupedAttention | None:
    """The backend of a model with windows; None: it has none."""
    if not geometry.layout.has_windows:
        return None
    return GroupedAttention(kv_pool, geometry, loaded.model.rotary, loaded.model.local_rotary)
