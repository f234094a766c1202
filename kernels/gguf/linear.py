"""y = x W^T over weights in GGUF blocks (`linear.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gguf.library import library

BLOCK_COLUMNS = {2: 32, 3: 32, 6: 32, 7: 32, 8: 32, 10: 256, 11: 256, 12: 256, 13: 256, 14: 256, 39: 32}
"""Columns per block, by ggml's number of each type that `blocks.h` reads.

They are Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and MXFP4.
"""
FLOATS = frozenset((torch.bfloat16, torch.float32))


class _Segment(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_void_p), ("row_bytes", ctypes.c_int64), ("count", ctypes.c_int64), ("type", ctypes.c_int64)
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of one type. rows: uint8 (num_rows, bytes of a row), each row contiguous. type_id: ggml's number."""

    rows: Tensor
    type_id: int


def max_integer_rows() -> int:
    """Return up to how many rows of x `BlockWeight.linear` is faster in integers. Needs `library()`."""
    found = library()
    assert found is not None, "whoever makes a weight has asked for the library"
    return int(found.gguf_max_integer_rows())


class BlockWeight:
    """A weight (num_rows, num_columns) whose rows are those of all parts. Needs `library()`."""

    def __init__(self, parts: Sequence[Blocks], num_columns: int) -> None:
        self.parts, self.num_columns = tuple(parts), num_columns
        self.num_rows = sum(len(part.rows) for part in parts)
        self.segments = (_Segment * len(parts))(
            *(_Segment(each.rows.data_ptr(), each.rows.stride(0), len(each.rows), each.type_id) for each in parts)
        )
        found = library()
        assert found is not None, "whoever makes a weight has asked for the library"
        self.library = found
        self.has_integers = all(bool(found.gguf_has_integers(part.type_id, num_columns)) for part in parts)

    def linear(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, in_integers: bool) -> Tensor:
        """Compute (rows of x, num_rows) in `dtype`, bfloat16 or float32, as x. bias: bfloat16.

        in_integers: x is quantized to int16, and weights are exactly the file's; needs `has_integers`. Otherwise
        weights are dequantized to bfloat16, or with AVX2 to float32, and x is rounded to bfloat16. Both are batch
        invariant.
        """
        assert {x.dtype, dtype} <= FLOATS, "of which the library knows"
        x = x.contiguous()
        num_x = x.shape[0]
        y = torch.empty(num_x, self.num_rows, dtype=dtype)
        is_done = self.library.gguf_linear(
            self.segments, len(self.segments), self.num_columns,
            x.data_ptr(), x.dtype == torch.float32, num_x,
            y.data_ptr(), self.num_rows, dtype == torch.float32,
            None if bias is None else bias.data_ptr(), in_integers,
        )  # fmt: skip
        if not is_done:
            raise MemoryError(f"no memory for {num_x} rows of {self.num_columns} numbers")
        return y

    def dequantize(self) -> Tensor:
        """Dequantize to (num_rows, num_columns) in bfloat16."""
        weight = torch.empty(self.num_rows, self.num_columns, dtype=torch.bfloat16)
        first = 0
        for index, part in enumerate(self.parts):
            segment = ctypes.byref(self.segments, index * ctypes.sizeof(_Segment))
            self.library.gguf_dequantize(segment, self.num_columns, weight[first:].data_ptr())
            first += len(part.rows)
        return weight
