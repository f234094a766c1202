"""Linear layers of packed weights of 2 to 6 bits on a GPU, by the fastest kernel for the number of rows.

`kernels/gpu/quantization/quantized_tuning.py` chooses: `packed_rows`, `packed_stream` on Hopper, `packed_gemm`, or
dequantization and cuBLAS.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kernels.gpu.quantization.dequantize_w4 import dequantize
from kernels.gpu.quantization.packed_gemm import packed_gemm, write_out
from kernels.gpu.quantization.packed_rows import packed_rows_gemm
from kernels.gpu.quantization.packed_stream import can_stream, packed_stream
from kernels.gpu.quantization.quantized_tuning import MAX_PACKED_ROWS, PACKED_ROWS, PACKED_STREAMS, PACKED_TILES
from kernels.gpu.tuning import found
from kernels.quantization.packed_weights import PackedWeight, of_w4
from kernels.quantization.w4a16_gemm import MAX_CHUNK, PackedW4


def packed_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, workspace: SplitKWorkspace) -> Tensor:
    """Compute x (rows, in), columns of stride 1 -> (rows, out) in the dtype of x."""
    y = _multiply(x, packed, bias, workspace)
    return functional.linear(x, write_out(packed, x.dtype), bias) if y is None else y


def w4a16_linear(x: Tensor, packed: PackedW4, bias: Tensor | None, workspace: SplitKWorkspace) -> Tensor:
    """Compute x (rows, in), columns of stride 1 -> (rows, out) in the dtype of x. Scales and offsets must be
    bfloat16.

    Rows of W that are no multiple of 128, and groups below 32, are dequantized first.
    """
    y, as_packed = None, of_w4(packed)
    if packed.chunk == MAX_CHUNK and packed.group_size >= as_packed.packing.words:
        y = _multiply(x, as_packed, bias, workspace)
    return functional.linear(x, dequantize(packed, x.dtype), bias) if y is None else y


def _multiply(x: Tensor, packed: PackedWeight, bias: Tensor | None, workspace: SplitKWorkspace) -> Tensor | None:
    """Multiply, or return None if dequantization and cuBLAS are faster, or x has another dtype."""
    if x.dtype != torch.bfloat16:
        return None
    (num_rows, k), n = x.shape, packed.words.shape[0]
    of_few = PACKED_ROWS.find(rows=num_rows, n_per_k=n / k, k=k, bits=packed.bits, pair=packed.pair_columns)
    if can_stream(x, packed) and (of_few is None or num_rows > MAX_PACKED_ROWS):
        return packed_stream(x, packed, bias, workspace, found(PACKED_STREAMS.find(rows=num_rows, n=n)))
    if of_few is not None:
        return packed_rows_gemm(x, packed, bias, of_few)
    tiles = PACKED_TILES.find(num_rows, n, k)
    return None if tiles is None else packed_gemm(x, packed, bias, workspace, tiles)
