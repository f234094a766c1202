"""Decode attention over a paged KV pool on a CPU (`attention.c`); formula: `kernels/paged_attention.py`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.native.library import DTYPES, library


class _Pool(ctypes.Structure):
    _fields_ = [
        ("numbers", ctypes.c_void_p), ("block_stride", ctypes.c_int64), ("layer_stride", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64), ("block_size", ctypes.c_int64), ("head_dim", ctypes.c_int64),
        ("num_heads", ctypes.c_int64), ("is_float32", ctypes.c_int64), ("scale", ctypes.c_float),
    ]  # fmt: skip


class _Queries(ctypes.Structure):
    _fields_ = [
        ("num_queries", ctypes.c_int64), ("tokens", ctypes.c_void_p), ("blocks", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p), ("tables", ctypes.c_void_p), ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
    ]  # fmt: skip


def supports(pool: Tensor, num_heads: int) -> bool:
    """Whether `DecodeAttention` supports this pool: (num_blocks, num_layers, 2, kv_heads, block_size, head_dim)."""
    if pool.dtype not in DTYPES or pool.device.type != "cpu" or pool.shape[2] != 2:
        return False
    found = library()
    return found is not None and bool(found.native_supports(ctypes.byref(_described(pool, num_heads))))


def _described(pool: Tensor, num_heads: int) -> _Pool:
    _, _, _, kv_heads, block_size, head_dim = pool.shape
    return _Pool(
        pool.data_ptr(), pool.stride(0), pool.stride(1), kv_heads, block_size, head_dim, num_heads,
        pool.dtype == torch.float32, 1.0 / math.sqrt(head_dim),
    )  # fmt: skip


class Queries:
    """The queries of a step's decode rows: one for each of their tokens, drafts included."""

    def __init__(
        self,
        tokens: Sequence[int],
        rows: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
        inputs: Tensor,
    ) -> None:
        """tokens, rows, lengths: each query's index in the step, its table, and its number of keys, itself included.
        tables: block ids of sequences. inputs: see `StepBatch.inputs`.
        """
        self.num_queries = len(tokens)
        first_of_table = np.cumsum([0, *map(len, tables[:-1])], dtype=np.int64)
        ints = [
            np.array(tokens, np.int64),
            np.concatenate([np.array(table, np.int64) for table in tables]),
            first_of_table[rows],
            np.array(lengths, np.int64),
        ]
        self._held = (ints, inputs)  # keeps memory alive that C reads
        tokens_at, tables_at, starts_at, lengths_at = (each.ctypes.data for each in ints)
        blocks_at, offsets_at = inputs[2].data_ptr(), inputs[3].data_ptr()
        self.struct = _Queries(self.num_queries, tokens_at, blocks_at, offsets_at, tables_at, starts_at, lengths_at)


class DecodeAttention:
    """Stores new K and V in a pool and attends; for pools that it `supports`."""

    def __init__(self, pool: Tensor, num_heads: int) -> None:
        found = library()
        assert found is not None, "`supports` has asked for it"
        self._attend, self._pool, self._struct = found.native_attend, pool, _described(pool, num_heads)
        self._strides = (pool.shape[3] * pool.shape[5], pool.shape[5], 1)  # of one token's K and V

    def __call__(self, layer: int, q: Tensor, kv: Tensor, queries: Queries) -> Tensor:
        """Attend. q (tokens, num_heads, head_dim), kv (tokens, 2, kv_heads, head_dim): of a step, in the pool's
        dtype.

        Copied unless each token is contiguous. Returns (queries, num_heads, head_dim).
        """
        if kv.stride()[1:] != self._strides:
            kv = kv.contiguous()
        if q.stride()[1:] != self._strides[1:]:
            q = q.contiguous()
        out = torch.empty(queries.num_queries, *q.shape[1:], dtype=q.dtype)
        is_done = self._attend(
            ctypes.byref(self._struct), layer, ctypes.byref(queries.struct), q.data_ptr(), q.stride(0),
            kv.data_ptr(), kv.stride(0), out.data_ptr(),
        )  # fmt: skip
        if not is_done:
            raise MemoryError("no memory for the scores of a step's attention")
        return out
