"""GEMMs with packed int4 weights on a GPU. Formula, layout and reference: `kernels/quantization/w4a16_gemm.py`.

A weight's bits, masked out and put under the exponent of 128, are the bfloat16 128 + w. Two of them cost a shift and
a logical operation and go to the matrix units as they are, nibble by nibble of the words; what 128 and the offset add
is a multiple of the sum of x, which the matrix units compute as well. Per group

    y += s (sum_k (128 + w_k) x_k) + (z - 136 s) sum_k x_k

in float32. A program owns few columns of y and all of K: each warp takes another chunk of 128 columns, their sums
meet at the end. This is for few rows of bfloat16; more of them go through `kernels/gpu/quantization/packed_gemm.py`.
For others (many rows, other types, groups below 32, rows of W that are no multiple of 128) the weight is written out,
for cuBLAS. `kernels/gpu/launching/tuning.py` says how many rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.gpu.gemm.split_k import SplitKWorkspace
from kernels.gpu.launching.launch import is_compiled, overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.launching.launch_configs import SlicedKConfig
from kernels.gpu.launching.tuning import PACKED_TILES, W4_ROWS
from kernels.gpu.quantization.nibbles import chunk_sums, load_one_row, scale_and_zero
from kernels.gpu.quantization.packed_gemm import MIN_PAIR_COLUMNS, packed_gemm
from kernels.quantization.packed_weights import of_w4
from kernels.quantization.w4a16_gemm import MAX_CHUNK, PackedW4

MAX_ROWS = 32
WORDS = tl.constexpr(MAX_CHUNK // 4)  # of a chunk
LINE = tl.constexpr(64)  # words of a line of the L2 cache


@triton.jit
def _load_rows(x_at, has_x):
    """Return the operands of several rows, each (chunks, words, rows)."""
    x0 = tl.load(x_at, mask=has_x, other=0.0)
    x1 = tl.load(x_at + WORDS, mask=has_x, other=0.0)
    x2 = tl.load(x_at + 2 * WORDS, mask=has_x, other=0.0)
    x3 = tl.load(x_at + 3 * WORDS, mask=has_x, other=0.0)
    return (
        tl.permute(x0, (0, 2, 1)), tl.permute(x1, (0, 2, 1)), tl.permute(x2, (0, 2, 1)), tl.permute(x3, (0, 2, 1)),
    )  # fmt: skip


@triton.jit
def _step(words, x_at, pair_at, has_x, has_pair, GROUP: tl.constexpr, COMPILED: tl.constexpr):
    """The sums of one chunk a warp: (chunks, columns, rows)."""
    x = load_one_row(x_at, has_x) if x_at.shape[1] == 1 else _load_rows(x_at, has_x)
    none = tl.zeros((words.shape[0], words.shape[1], x_at.shape[1]), tl.float32)
    return chunk_sums(none, words, x, pair_at, has_pair, none, "int4", GROUP, COMPILED, True)


@triton.jit(do_not_specialize_on_alignment=["M"])
def _w4_rows_kernel(
    x_ptr, words_ptr, pairs_ptr, bias_ptr, out_ptr, M, N, num_chunks, x_stride,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, AHEAD: tl.constexpr, PREFETCHED: tl.constexpr, NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = 4 * WORDS
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    rows = tl.arange(0, BLOCK_M)
    chunk_ids = tl.arange(0, CHUNKS)
    num_words = num_chunks * WORDS  # in this form the compiler knows that rows start at 16 bytes
    word_rows = words_ptr + columns.to(tl.int64)[None, :, None] * num_words
    word_at = word_rows + (chunk_ids * WORDS)[:, None, None] + tl.arange(0, WORDS)[None, None, :]
    pair_at = (
        pairs_ptr
        + columns.to(tl.int64)[None, :] * (num_chunks * (CHUNK // GROUP))
        + (chunk_ids * (CHUNK // GROUP))[:, None]
    )
    x_at = x_ptr + rows.to(tl.int64)[None, :, None] * x_stride + (chunk_ids * CHUNK)[:, None, None]
    x_at = x_at + tl.arange(0, WORDS)[None, None, :]
    has_row = (rows < M)[None, :, None]
    if PREFETCHED > 0:
        lines = tl.minimum(AHEAD * CHUNKS * WORDS + tl.arange(0, PREFETCHED) * LINE, num_words - 1)
        prefetch(
            words_ptr + tl.where(inside, columns, 0).to(tl.int64)[:, None] * num_words + lines[None, :], OVERLAPS
        )
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    ahead = ()
    for step in tl.static_range(AHEAD):
        exists = (step * CHUNKS + chunk_ids < num_chunks)[:, None, None] & inside[None, :, None]
        ahead = ahead + (tl.load(word_at + step * CHUNKS * WORDS, mask=exists, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_predecessor(OVERLAPS)
    total = tl.zeros((CHUNKS, BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.static_range(AHEAD):
        exists = step * CHUNKS + chunk_ids < num_chunks
        total += _step(
            ahead[step], x_at + step * CHUNKS * CHUNK, pair_at + step * CHUNKS * (CHUNK // GROUP),
            has_row & exists[:, None, None], inside[None, :] & exists[:, None], GROUP, COMPILED,
        )  # fmt: skip
    for first in tl.range(AHEAD * CHUNKS, num_chunks, CHUNKS, num_stages=NUM_STAGES):
        exists = first + chunk_ids < num_chunks
        if EVEN:
            words = tl.load(word_at + first * WORDS)
            has_x, has_pair = has_row, (columns >= 0)[None, :]
        else:
            words = tl.load(word_at + first * WORDS, mask=exists[:, None, None] & inside[None, :, None], other=0)
            has_x, has_pair = has_row & exists[:, None, None], inside[None, :] & exists[:, None]
        total += _step(
            words, x_at + first * CHUNK, pair_at + first * (CHUNK // GROUP), has_x, has_pair, GROUP, COMPILED
        )
    y = tl.sum(total, axis=0)
    if HAS_BIAS:
        y += bias
    outputs = out_ptr + rows.to(tl.int64)[None, :] * N + columns[:, None]
    tl.store(outputs, y.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (rows < M)[None, :])


@triton.jit
def _dequantize_kernel(
    words_ptr, pairs_ptr, out_ptr, num_words, GROUP: tl.constexpr, PER_CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """PER_CHUNK: words of a chunk."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    words = tl.load(words_ptr + row * num_words + at, mask=inside, other=0).to(tl.int32)
    first = at // PER_CHUNK * (4 * PER_CHUNK) + at % PER_CHUNK
    for nibble in tl.static_range(4):
        column = first + nibble * PER_CHUNK
        pairs = tl.load(pairs_ptr + row * (num_words * 4 // GROUP) + column // GROUP, mask=inside, other=0)
        scale, zero = scale_and_zero(pairs)
        value = (((words >> 4 * nibble) & 15) | 0x4B000000).to(tl.float32, bitcast=True)  # 2^23 + w
        weight = (value - 8388616.0) * scale + zero
        tl.store(out_ptr + row * num_words * 4 + column, weight.to(out_ptr.dtype.element_ty), mask=inside)


def w4a16_linear(x: Tensor, packed: PackedW4, bias: Tensor | None, workspace: SplitKWorkspace) -> Tensor:
    """x (rows, in), columns of stride 1 -> (rows, out) in the dtype of x. Scales and offsets must be bfloat16."""
    num_rows, n, k = x.shape[0], packed.words.shape[0], x.shape[1]
    if x.dtype == torch.bfloat16 and k % MAX_CHUNK == 0 and packed.group_size >= MIN_PAIR_COLUMNS:
        config = W4_ROWS.find(num_rows, n, k)
        if config is not None:
            return w4_skinny_gemm(x, packed, bias, config)
        tiles = PACKED_TILES.find(num_rows, n, k)
        if tiles is not None:
            return packed_gemm(x, of_w4(packed), bias, workspace, tiles)
    return functional.linear(x, dequantize(packed, x.dtype), bias)


def w4_skinny_gemm(x: Tensor, packed: PackedW4, bias: Tensor | None, config: SlicedKConfig) -> Tensor:
    """x (up to 32 rows, in), bfloat16, columns of stride 1 -> (rows, out)."""
    (num_rows, k), n = x.shape, packed.words.shape[0]
    if num_rows > MAX_ROWS or k % MAX_CHUNK:
        raise ValueError(f"{num_rows} rows of {k} are too many or no multiple of {MAX_CHUNK} columns")
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    overlaps = overlaps_launches(x)
    num_steps, rest = divmod(k // MAX_CHUNK, config.num_warps)
    _w4_rows_kernel[(triton.cdiv(n, config.block_n),)](
        x, packed.words, packed.scales_and_zeros.view(torch.int32), x if bias is None else bias, out,
        num_rows, n, k // MAX_CHUNK, x.stride(0),
        HAS_BIAS=bias is not None, GROUP=packed.group_size, EVEN=n % config.block_n == 0 and not rest,
        BLOCK_M=1 if num_rows == 1 else max(8, triton.next_power_of_2(num_rows)), BLOCK_N=config.block_n,
        CHUNKS=config.num_warps, AHEAD=min(config.ahead, num_steps), PREFETCHED=config.prefetched if overlaps else 0,
        NUM_STAGES=config.num_stages, OVERLAPS=overlaps, COMPILED=is_compiled(x), num_warps=config.num_warps,
        launch_pdl=overlaps,
    )  # fmt: skip
    return out


def dequantize(packed: PackedW4, dtype: torch.dtype) -> Tensor:
    """(out, in), for GEMMs of many rows."""
    n, num_words = packed.words.shape
    out = torch.empty(n, num_words * 4, dtype=dtype, device=packed.words.device)
    block = 256
    _dequantize_kernel[(triton.cdiv(num_words, block), n)](
        packed.words, packed.scales_and_zeros.view(torch.int32), out, num_words, GROUP=packed.group_size,
        PER_CHUNK=packed.chunk // 4, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
