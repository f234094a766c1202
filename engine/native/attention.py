"""Attention on a CPU: decode rows straight from the pool's blocks, chunks of prompts from gathered ones.

A decode row with drafts is several queries of one sequence, each of which sees one key more than the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.cpu.batch import StepBatch
from engine.cpu_forms.rows import is_generated
from engine.layers.attention import AttentionBlock
from engine.layers.rotary import Rotation
from engine.loader.load import LoadedModel
from kernels.native.chunk_attention import causal_corner, chunk_attention, padded_len
from kernels.native.decode_attention import DecodeAttention, Queries, supports
from kernels.paged_attention import write_kv
from kvstore.layout import PoolGeometry
from kvstore.types import BlockId, runs_of

MIN_RUN = 8  # blocks, on average: shorter runs are gathered by one operation more, which copies twice


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
class NativeMetadata:
    """Where tokens go, and who attends how.

    decoded: queries of decode rows, which are these `tokens` of the step; None: there are none.
    """

    rotation: Rotation
    blocks: Tensor  # (num_tokens,)
    offsets: Tensor
    decoded: Queries | None
    tokens: list[int]
    chunks: list[Chunk] = field(default_factory=list)


def attention_for(loaded: LoadedModel, kv_pool: Tensor, geometry: PoolGeometry) -> NativeAttention | None:
    """The backend, where there is a compiler and it takes this pool."""
    num_heads = loaded.model.config.num_heads
    if kv_pool.dtype != loaded.dtype or not supports(kv_pool, num_heads):
        return None
    return NativeAttention(kv_pool, num_heads, loaded.model.rotary)


class NativeAttention:
    """The backend for pools of K and V in host memory that `kernels.native.decode_attention` supports."""

    name = "native"

    def __init__(self, pool: Tensor, num_heads: int, rotary: Tensor) -> None:
        """rotary: see `rotary_table`."""
        self._rotary = rotary
        self._kv_heads, self._block_size = pool.shape[3:5]
        self._pool = pool
        self._corner = causal_corner(num_heads // self._kv_heads, pool.dtype)
        self._decode = DecodeAttention(pool, num_heads)

    def plan(self, batch: StepBatch, inputs: Tensor) -> NativeMetadata:
        tokens: list[int] = []
        rows: list[int] = []
        lengths: list[int] = []
        tables: list[list[BlockId]] = []
        chunks: list[Chunk] = []
        for index, (row, request) in enumerate(zip(batch.rows, batch.requests, strict=True)):
            if not is_generated(row, request):
                chunks.append(self._chunk_of(batch, index))
                continue
            tokens += range(*batch.query_starts[index : index + 2])
            rows += [len(tables)] * row.num_tokens
            lengths += range(row.start + 1, row.stop + 1)
            tables.append(request.block_ids[: -(-row.stop // self._block_size)])
        decoded = Queries(tokens, rows, lengths, tables, inputs) if tokens else None
        return NativeMetadata(Rotation.of(self._rotary, inputs[1]), inputs[2], inputs[3], decoded, tokens, chunks)

    def attend(self, block: AttentionBlock, qkv: Tensor, metadata: NativeMetadata) -> Tensor:
        layer, (q, kv) = block.layer, block.heads(qkv, metadata.rotation)
        decoded = metadata.decoded
        if decoded is not None and not metadata.chunks:
            return block.outputs(self._decode(layer, q, kv, decoded))
        write_kv(self._pool, layer, kv, metadata.blocks, metadata.offsets)
        out = torch.empty(q.shape, dtype=q.dtype)
        if decoded is not None:
            out[metadata.tokens] = self._decode(layer, q, kv, decoded)
        for chunk in metadata.chunks:
            tokens, gathered = slice(chunk.start, chunk.stop), self._gather(layer, chunk)
            out[tokens] = chunk_attention(q[tokens], gathered, chunk.seq_len, self._corner)
        return block.outputs(out)

    def _chunk_of(self, batch: StepBatch, index: int) -> Chunk:
        seq_len = batch.seq_lens[index]
        num_blocks = -(-seq_len // self._block_size)
        # Whole blocks are copied in, so the buffer may end within the last one.
        size = max(padded_len(seq_len), num_blocks * self._block_size)
        workspace = torch.zeros(2, self._kv_heads, size, self._pool.shape[5], dtype=self._pool.dtype)
        block_ids = batch.requests[index].block_ids[:num_blocks]
        start, stop = batch.query_starts[index], batch.query_starts[index + 1]
        return Chunk(start, stop, seq_len, torch.tensor(block_ids), list(runs_of(block_ids)), workspace)

    def _gather(self, layer: int, chunk: Chunk) -> Tensor:
        """The chunk's sequence up to its last token, with zeros after it."""
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
