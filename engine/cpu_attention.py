"""Attention on a CPU: decode rows from the dense mirror, chunks of prompts from gathered blocks.

New K and V of prompts go to the pool layer by layer. Those of decode rows go to the mirror, and from there to the
pool once per step, after the last layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.kv_mirror import Arena, KVMirror, MirrorRow, padded_rows
from kernels.cpu_attention import chunk_attention, decode_attention, key_mask, keys_to_read, padded_len
from kernels.paged_attention import write_kv
from kvstore.types import BlockId

MIRROR_TO_POOL_BYTES = 2  # the mirror may take this many times the pool's memory


@dataclass(slots=True)
class RowOrder:
    """How a group's rows and the step's decode rows correspond."""

    batch_rows: Tensor  # (n,) which decode rows of the step the group computes
    source_rows: Tensor  # (num_rows,) decode row whose query each arena row computes; vacant: any


@dataclass(slots=True)
class DecodeGroup:
    """Decode rows whose KV lies in one arena, computed together with the arena's vacant and padding rows."""

    arena: Arena
    arena_rows: Tensor  # (n,) where the rows' KV lies
    positions: Tensor  # (n,) of the new tokens
    order: RowOrder | None  # None: arena rows are exactly the step's tokens, in order: nothing to permute
    stores: list[tuple[int, int, BlockId, int]]  # of each new token: arena row, position, pool block, offset in it
    num_rows: int
    mask: Tensor  # (num_rows, 1, 1, num_keys)
    views: list[tuple[Tensor, Tensor, Tensor]]


@dataclass(slots=True)
class Chunk:
    """One row that reads its context from the pool."""

    start: int  # in the step's tokens
    stop: int
    seq_len: int
    block_ids: Tensor
    workspace: Tensor  # (2, kv_heads, padded_len(seq_len), head_dim), zero beyond the blocks


@dataclass(slots=True)
class CpuMetadata:
    """Where tokens go, and who attends how. `pool_tokens`: tokens whose K and V are written layer by layer."""

    blocks: Tensor  # (num_tokens,)
    offsets: Tensor
    groups: list[DecodeGroup] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    pool_tokens: Tensor | None = None


class CpuAttention:
    """Implements `AttentionBackend` for pools in host memory."""

    def __init__(self, pool: Tensor, num_heads: int) -> None:
        num_blocks, self._num_layers, _, self._kv_heads, self._block_size, self._head_dim = pool.shape
        self._pool = pool
        self._num_heads = num_heads
        self._group = num_heads // self._kv_heads
        self._scale = 1.0 / math.sqrt(self._head_dim)
        self._mirror = KVMirror(pool, MIRROR_TO_POOL_BYTES * num_blocks * self._block_size)

    def prepare(self, batch: StepBatch, inputs: Tensor) -> CpuMetadata:
        metadata = CpuMetadata(inputs[2], inputs[3])
        num_decode = batch.num_decode_rows
        starts = [seq_len - 1 for seq_len in batch.seq_lens[:num_decode]]
        rows = self._mirror.sync(batch.requests[:num_decode], starts)
        by_arena: dict[int, list[tuple[int, MirrorRow]]] = {}
        unmirrored = list(range(num_decode, len(batch.requests)))
        for index, row in enumerate(rows):
            if row is None:
                unmirrored.append(index)
            else:
                by_arena.setdefault(row.arena.capacity, []).append((index, row))
        for members in by_arena.values():
            metadata.groups.append(self._group_of(members, batch, inputs))
        for index in unmirrored:
            metadata.chunks.append(self._chunk_of(batch, index))
        if metadata.chunks and metadata.groups:
            spans = [torch.arange(chunk.start, chunk.stop) for chunk in metadata.chunks]
            metadata.pool_tokens = torch.cat(spans)
        return metadata

    def attend(self, layer: int, qkv: Tensor, metadata: CpuMetadata) -> Tensor:
        num_heads = self._num_heads
        q, kv = qkv[:, :num_heads], qkv[:, num_heads:].view(-1, 2, self._kv_heads, self._head_dim)
        if metadata.chunks:
            self._write_chunks(layer, kv, metadata)
        elif len(metadata.groups) == 1 and metadata.groups[0].order is None:
            out = self._attend_group(layer, q, kv, metadata.groups[0])
            self._write_decoded(layer, metadata)
            return out.view(qkv.shape[0], -1)
        out = torch.empty(q.shape, dtype=q.dtype)
        for group in metadata.groups:
            assert group.order is not None  # else the group was the whole step
            mixed = self._attend_group(layer, q, kv, group)
            out[group.order.batch_rows] = mixed.view(-1, num_heads, self._head_dim)[group.arena_rows]
        for chunk in metadata.chunks:
            gathered = self._gather(layer, chunk)
            out[chunk.start : chunk.stop] = chunk_attention(q[chunk.start : chunk.stop], gathered, chunk.seq_len)
        self._write_decoded(layer, metadata)
        return out.flatten(1)

    def _group_of(self, members: list[tuple[int, MirrorRow]], batch: StepBatch, inputs: Tensor) -> DecodeGroup:
        arena = members[0][1].arena
        num_rows = min(padded_rows(arena.extent), arena.num_slots)
        num_keys = keys_to_read(num_rows, max(row.length for _, row in members), arena.capacity)
        lengths, source_rows = [1] * num_rows, [0] * num_rows
        stores = []
        for index, row in members:
            lengths[row.index], source_rows[row.index] = row.length, index
            position = row.length - 1
            block = row.block_ids[position // self._block_size]
            stores.append((row.index, position, block, position % self._block_size))
        if len(members) == batch.num_tokens and source_rows == list(range(batch.num_tokens)):
            arena_rows, positions, order = torch.tensor(source_rows), inputs[1], None
        else:
            batch_rows = torch.tensor([index for index, _ in members])
            arena_rows = torch.tensor([row.index for _, row in members])
            positions, order = inputs[1][batch_rows], RowOrder(batch_rows, torch.tensor(source_rows))
        return DecodeGroup(
            arena,
            arena_rows,
            positions,
            order,
            stores,
            num_rows,
            mask=key_mask(arena.mask_source, lengths, num_keys),
            views=arena.views(num_rows, num_keys),
        )

    def _chunk_of(self, batch: StepBatch, index: int) -> Chunk:
        seq_len = batch.seq_lens[index]
        num_blocks = -(-seq_len // self._block_size)
        # Whole blocks are copied in, so the buffer may end within the last one.
        size = max(padded_len(seq_len), num_blocks * self._block_size)
        workspace = torch.zeros(2, self._kv_heads, size, self._head_dim, dtype=self._pool.dtype)
        table = torch.tensor(batch.requests[index].block_ids[:num_blocks])
        return Chunk(batch.query_starts[index], batch.query_starts[index + 1], seq_len, table, workspace)

    def _attend_group(self, layer: int, q: Tensor, kv: Tensor, group: DecodeGroup) -> Tensor:
        """Store K and V in the mirror and attend: (num_rows, kv_heads, group, head_dim)."""
        target, keys, values = group.views[layer]
        if group.order is not None:
            q, kv = q[group.order.source_rows], kv[group.order.batch_rows]
        target.index_put_((group.arena_rows, group.positions), kv)
        q = q.reshape(group.num_rows, self._kv_heads, self._group, self._head_dim)
        return decode_attention(q, keys, values, group.mask, self._scale)

    def _write_chunks(self, layer: int, kv: Tensor, metadata: CpuMetadata) -> None:
        tokens = metadata.pool_tokens
        if tokens is None:
            write_kv(self._pool, layer, kv, metadata.blocks, metadata.offsets)
        else:
            write_kv(self._pool, layer, kv[tokens], metadata.blocks[tokens], metadata.offsets[tokens])

    def _gather(self, layer: int, chunk: Chunk) -> Tensor:
        """The chunk's sequence up to its last token, with zeros behind it."""
        num_blocks = chunk.block_ids.shape[0]
        covered = num_blocks * self._block_size
        by_block = chunk.workspace[:, :, :covered].view(2, self._kv_heads, num_blocks, self._block_size, -1)
        by_block.copy_(self._pool[chunk.block_ids, layer].permute(1, 2, 0, 3, 4))
        chunk.workspace[:, :, chunk.seq_len :] = 0  # the last block's unused places may hold anything
        return chunk.workspace

    def _write_decoded(self, layer: int, metadata: CpuMetadata) -> None:
        """After the last layer: what decode rows added to the mirror, all layers at once, to the pool."""
        if layer != self._num_layers - 1:
            return
        for group in metadata.groups:
            for arena_row, position, block, offset in group.stores:
                self._pool[block, :, :, :, offset] = group.arena.kv[:, :, arena_row, :, position]
