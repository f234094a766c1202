"""Attention on a CPU: decode rows from the dense mirror, chunks of prompts from gathered blocks.

A decode row with drafts is several queries of one row of the mirror, each of which sees one key more than the last.
New K and V of prompts go to the pool layer by layer. Those of decode rows go to the mirror, and from there to the
pool once per step, after the last layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.cpu.batch import StepBatch, is_generated
from engine.cpu.kv_mirror import KVMirror, LayerViews, MirrorRow
from engine.layers.attention import AttentionBlock
from engine.layers.rotary import Rotation
from kernels.cpu_attention import (
    KEY_STEP,
    KVRows,
    causal_corner,
    chunk_attention,
    decode_attention,
    key_mask,
    padded_len,
)
from kernels.paged_attention import write_kv
from kvstore.handle.runs import runs_of

MIRROR_TO_POOL_BYTES = 2  # the mirror may take this many times the pool's memory
MIN_RUN = 8  # blocks, on average: shorter runs are gathered by one operation more, which copies twice


@dataclass(slots=True)
class DecodeGroup:
    """Queries of decode rows whose KV lies in one arena."""

    tokens: Tensor | None  # (n,) which of the step's tokens they are; None: all, in order
    rows: KVRows
    kv_indices: Tensor  # (n, 2, kv_heads, head_dim) of the new tokens' KV in the arena
    mask: Tensor  # (n, 1, num_keys)
    layers: list[LayerViews]


@dataclass(slots=True)
class Chunk:
    """One row that reads its context from the pool."""

    start: int  # in the step's tokens
    stop: int
    seq_len: int
    block_ids: Tensor
    block_runs: list[tuple[int, int, int]]  # the same as runs, see `runs_of`
    workspace: Tensor  # (2, kv_heads, padded_len(seq_len), head_dim), zero beyond the blocks


@dataclass(slots=True)
class CpuMetadata:
    """Where tokens go, and who attends how.

    chunk_tokens, mirrored_tokens: which of the step's tokens are written layer by layer and after the last layer;
    None where it is all of them.
    """

    rotation: Rotation
    blocks: Tensor  # (num_tokens,)
    offsets: Tensor
    groups: list[DecodeGroup] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    chunk_tokens: Tensor | None = None
    mirrored_tokens: Tensor | None = None
    new_kv: list[Tensor] = field(default_factory=list)  # per layer (mirrored tokens, 2, kv_heads, head_dim)


Query = tuple[int, MirrorRow, int]  # which of the step's tokens, where its sequence lies, how much of it that sees


class CpuAttention:
    """The backend for pools of K and V in host memory."""

    name = "mirror"

    def __init__(self, pool: Tensor, num_heads: int, rotary: Tensor) -> None:
        """rotary: see `rotary_table`."""
        self._rotary = rotary
        num_blocks, self._num_layers, _, self._kv_heads, self._block_size, self._head_dim = pool.shape
        self._pool = pool
        self._num_heads = num_heads
        self._scale = 1.0 / math.sqrt(self._head_dim)
        self._corner = causal_corner(num_heads // self._kv_heads, pool.dtype)
        self._mirror = KVMirror(pool, MIRROR_TO_POOL_BYTES * num_blocks * self._block_size)

    def plan(self, batch: StepBatch, inputs: Tensor) -> CpuMetadata:
        metadata = CpuMetadata(Rotation.of(self._rotary, inputs[1]), inputs[2], inputs[3])
        is_decoding = list(map(is_generated, batch.rows, batch.requests))
        decoding = [index for index, is_one in enumerate(is_decoding) if is_one]
        starts = [batch.rows[index].start for index in decoding]
        stops = [batch.seq_lens[index] for index in decoding]
        # A pass of prompts alone leaves the mirror as it is: generated tokens of the same step have their own pass.
        rows = self._mirror.sync([batch.requests[index] for index in decoding], starts, stops) if decoding else []
        by_arena: dict[int, list[Query]] = {}
        mirrored: list[int] = []
        for index, start, row in zip(decoding, starts, rows, strict=True):
            queries = by_arena.setdefault(id(row.arena), [])
            for seq_len, token in enumerate(range(*batch.query_starts[index : index + 2]), start + 1):
                mirrored.append(token)
                queries.append((token, row, seq_len))
        for queries in by_arena.values():
            metadata.groups.append(self._group_of(queries, batch, inputs))
        metadata.chunks += [self._chunk_of(batch, index) for index, is_one in enumerate(is_decoding) if not is_one]
        if metadata.chunks and metadata.groups:
            spans = [torch.arange(chunk.start, chunk.stop) for chunk in metadata.chunks]
            metadata.chunk_tokens, metadata.mirrored_tokens = torch.cat(spans), torch.tensor(mirrored)
        return metadata

    def attend(self, block: AttentionBlock, qkv: Tensor, metadata: CpuMetadata) -> Tensor:
        layer, (q, kv) = block.layer, block.heads(qkv, metadata.rotation)
        if metadata.chunks:
            self._write_chunks(layer, kv, metadata)
        if metadata.groups:
            self._keep_decoded(layer, kv, metadata)
        if len(metadata.groups) == 1 and metadata.groups[0].tokens is None:
            return block.outputs(self._attend_group(layer, q, kv, metadata.groups[0]))
        out = torch.empty(q.shape, dtype=q.dtype)
        for group in metadata.groups:
            assert group.tokens is not None  # else the group was the whole step
            out[group.tokens] = self._attend_group(layer, q[group.tokens], kv[group.tokens], group)
        for chunk in metadata.chunks:
            tokens, gathered = slice(chunk.start, chunk.stop), self._gather(layer, chunk)
            out[tokens] = chunk_attention(q[tokens], gathered, chunk.seq_len, self._corner)
        return block.outputs(out)

    def _group_of(self, queries: list[Query], batch: StepBatch, inputs: Tensor) -> DecodeGroup:
        arena = queries[0][1].arena
        lengths = [seq_len for _, _, seq_len in queries]
        num_keys = min(-(-max(lengths) // KEY_STEP) * KEY_STEP, arena.capacity)
        is_whole_step = len(queries) == batch.num_tokens
        tokens = None if is_whole_step else torch.tensor([token for token, _, _ in queries])
        positions = inputs[1] if tokens is None else inputs[1][tokens]
        rows = arena.some_rows([row.index for _, row, _ in queries], num_keys, self._num_heads)
        return DecodeGroup(
            tokens,
            rows.to_read,
            rows.places_of(positions),
            key_mask(arena.mask_source, lengths, num_keys),
            arena.layers,
        )

    def _chunk_of(self, batch: StepBatch, index: int) -> Chunk:
        seq_len = batch.seq_lens[index]
        num_blocks = -(-seq_len // self._block_size)
        # Whole blocks are copied in, so the buffer may end within the last one.
        size = max(padded_len(seq_len), num_blocks * self._block_size)
        workspace = torch.zeros(2, self._kv_heads, size, self._head_dim, dtype=self._pool.dtype)
        block_ids = batch.requests[index].block_ids[:num_blocks]
        start, stop = batch.query_starts[index], batch.query_starts[index + 1]
        return Chunk(start, stop, seq_len, torch.tensor(block_ids), list(runs_of(block_ids)), workspace)

    def _attend_group(self, layer: int, q: Tensor, kv: Tensor, group: DecodeGroup) -> Tensor:
        """Store K and V in the mirror and attend: (n, num_heads, head_dim)."""
        views = group.layers[layer]
        views.flat.put_(group.kv_indices, kv)
        return decode_attention(q, views.keys, views.values, group.rows, group.mask, self._scale)

    def _write_chunks(self, layer: int, kv: Tensor, metadata: CpuMetadata) -> None:
        tokens = metadata.chunk_tokens
        if tokens is None:
            write_kv(self._pool, layer, kv, metadata.blocks, metadata.offsets)
        else:
            write_kv(self._pool, layer, kv[tokens], metadata.blocks[tokens], metadata.offsets[tokens])

    def _gather(self, layer: int, chunk: Chunk) -> Tensor:
        """The chunk's sequence up to its last token, with zeros behind it."""
        num_blocks = chunk.block_ids.shape[0]
        covered = num_blocks * self._block_size
        by_block = chunk.workspace[:, :, :covered].view(2, self._kv_heads, num_blocks, self._block_size, -1)
        if len(chunk.block_runs) * MIN_RUN > num_blocks:
            by_block.copy_(self._pool[chunk.block_ids, layer].permute(1, 2, 0, 3, 4))
        else:
            for place, block_id, count in chunk.block_runs:
                blocks = self._pool[block_id : block_id + count, layer]
                by_block[:, :, place : place + count].copy_(blocks.permute(1, 2, 0, 3, 4))
        chunk.workspace[:, :, chunk.seq_len : covered] = 0  # the last block's unused slots may hold anything
        return chunk.workspace

    def _keep_decoded(self, layer: int, kv: Tensor, metadata: CpuMetadata) -> None:
        """Keep what goes to the mirror, and after the last layer write it to the pool, all layers at once."""
        tokens = metadata.mirrored_tokens
        metadata.new_kv.append(kv if tokens is None else kv[tokens])
        if layer != self._num_layers - 1:
            return
        blocks, offsets = metadata.blocks, metadata.offsets
        if tokens is not None:
            blocks, offsets = blocks[tokens], offsets[tokens]
        by_token = self._pool.permute(0, 4, 1, 2, 3, 5)  # (num_blocks, block_size, num_layers, 2, kv_heads, head_dim)
        by_token.index_put_((blocks, offsets), torch.stack(metadata.new_kv, dim=1))
