"""GEMMs of packed weights of 2 to 6 bits, dequantized to bfloat16 in registers, and dequantization to memory.

    y_mn = sum_k w_nk x_mk + b_n;   w = (q - 2^(bits - 1)) s + z

A tile of W is the M operand of `tl.dot`, in registers, and x, padded to 16 rows, the N operand. Unpacking gives the
bfloat16 128 + q; an exact subtraction and a fused multiply-add turn it into the weight, which is rounded once. With
many rows cuBLAS is faster, for which the weight is dequantized to memory.

Layout and reference: `kernels/quantization/packed_weights.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.few_rows.few_row_tuning import MAX_PREFETCHED_WEIGHTS
from kernels.gpu.few_rows.gemm_configs import TileConfig
from kernels.gpu.few_rows.split_k import SplitKWorkspace, reduce_splits
from kernels.gpu.launch import is_compiled, overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.quantization.packed_parts import (
    check_packed,
    chunks_of,
    dequantize_part,
    high_bits_of,
    parts_of,
    words_of,
)
from kernels.quantization.packed_weights import PackedWeight
from kernels.quantization.w4a16_gemm import MAX_CHUNK

PREFETCHED = tl.constexpr(512)  # words per row
LINE = tl.constexpr(64)  # words per line of the L2 cache
DEQUANTIZED_ROWS = 32  # rows per program of the dequantization


@triton.jit(do_not_specialize_on_alignment=["M"])
def _packed_kernel(
    x_ptr, words_ptr, high_ptr, pairs_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, M, N, num_steps, x_stride,
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, PAIR: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
    PREFETCHES: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """PAIR: columns per pair."""
    WORDS: tl.constexpr = words_of(BITS)
    CHUNKS: tl.constexpr = chunks_of(BITS)
    PARTS: tl.constexpr = parts_of(BITS)
    STEP: tl.constexpr = CHUNKS * PARTS * WORDS
    SHARING: tl.constexpr = PAIR // WORDS  # parts that share a pair
    num_m = tl.cdiv(M, BLOCK_M)
    tile_m = tl.program_id(0) % num_m  # adjacent programs share a tile of W and run together
    columns = tl.program_id(0) // num_m * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    has_row = (rows < M)[:, None]
    offsets = tl.arange(0, WORDS)[None, :]
    row_words = num_steps * (CHUNKS * WORDS)  # in this form the compiler knows that rows are 16-byte aligned
    word_at = words_ptr + columns.to(tl.int64)[:, None] * row_words + offsets
    high_at = high_ptr + columns.to(tl.int64)[:, None] * (num_steps * WORDS) + offsets
    pair_at = pairs_ptr + columns.to(tl.int64) * (num_steps * (STEP // PAIR))
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_stride + offsets
    share = tl.cdiv(num_steps, SPLIT_K)
    first = tl.program_id(1) * share
    ahead = tl.minimum(first * CHUNKS * WORDS + tl.arange(0, PREFETCHED // LINE) * LINE, row_words - 1)
    prefetch(words_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * row_words + ahead[None, :], PREFETCHES)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    wait_for_predecessor(OVERLAPS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(first, tl.minimum(first + share, num_steps), num_stages=NUM_STAGES):
        high = 0
        if high_bits_of(BITS) > 0 and EVEN:
            high = tl.load(high_at + step * WORDS)
        elif high_bits_of(BITS) > 0:
            high = tl.load(high_at + step * WORDS, mask=inside[:, None], other=0)
        for chunk in tl.static_range(CHUNKS):
            if EVEN:
                words = tl.load(word_at + (step * CHUNKS + chunk) * WORDS)
            else:
                words = tl.load(word_at + (step * CHUNKS + chunk) * WORDS, mask=inside[:, None], other=0)
            for part in tl.static_range(chunk * PARTS, chunk * PARTS + PARTS):
                pairs = tl.load(pair_at + step * (STEP // PAIR) + part // SHARING, mask=inside, other=0)[:, None]
                x = tl.load(x_at + step * STEP + part * WORDS, mask=has_row, other=0.0)
                weights = dequantize_part(words, high, pairs, BITS, part, COMPILED)
                total = tl.dot(weights, tl.trans(x).to(weights.dtype), total, input_precision="ieee")
    exists = inside[:, None] & (rows < M)[None, :]
    is_last, y = reduce_splits(total, partials_ptr, counters_ptr, tl.program_id(0), tl.program_id(1), exists, SPLIT_K)
    if is_last:
        if HAS_BIAS:
            y += bias
        outputs = out_ptr + rows.to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(outputs, y.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _write_out_kernel(
    words_ptr, high_ptr, pairs_ptr, out_ptr, N, num_steps, BITS: tl.constexpr, PAIR: tl.constexpr,
    BLOCK_N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """A program dequantizes a step of several rows."""
    WORDS: tl.constexpr = words_of(BITS)
    CHUNKS: tl.constexpr = chunks_of(BITS)
    PARTS: tl.constexpr = parts_of(BITS)
    STEP: tl.constexpr = CHUNKS * PARTS * WORDS
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    at = rows.to(tl.int64) * num_steps + tl.program_id(1)
    offsets = tl.arange(0, WORDS)[None, :]
    high = 0
    if high_bits_of(BITS) > 0:
        high = tl.load(high_ptr + at[:, None] * WORDS + offsets, mask=inside[:, None], other=0)
    for chunk in tl.static_range(CHUNKS):
        words_at = (at[:, None] * CHUNKS + chunk) * WORDS + offsets
        words = tl.load(words_ptr + words_at, mask=inside[:, None], other=0)
        for part in tl.static_range(chunk * PARTS, chunk * PARTS + PARTS):
            pairs = tl.load(pairs_ptr + at * (STEP // PAIR) + part * WORDS // PAIR, mask=inside, other=0)[:, None]
            weights = dequantize_part(words, high, pairs, BITS, part, COMPILED)
            outputs = out_ptr + at[:, None] * STEP + part * WORDS + offsets
            tl.store(outputs, weights.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def packed_gemm(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, workspace: SplitKWorkspace, config: TileConfig
) -> Tensor:
    """Multiply x (rows, in), bfloat16, columns of stride 1 -> (rows, out).

    The config's stages are of 128 columns, as many as its block_k.
    """
    (num_rows, k), n = x.shape, packed.words.shape[0]
    step = check_packed(packed)
    block_m = max(16, min(config.block_m, triton.next_power_of_2(num_rows)))
    num_tiles = triton.cdiv(n, config.block_n) * triton.cdiv(num_rows, block_m)
    workspace.check(num_tiles, config.block_n * block_m, config.split_k)
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    overlaps = overlaps_launches(x)
    _packed_kernel[(num_tiles, config.split_k)](
        x, packed.words, packed.words if packed.high is None else packed.high, packed.pairs.view(torch.int32),
        x if bias is None else bias, out, workspace.partials, workspace.counters, num_rows, n, k // step, x.stride(0),
        HAS_BIAS=bias is not None, BITS=packed.bits, PAIR=packed.pair_columns, EVEN=n % config.block_n == 0,
        BLOCK_M=block_m, BLOCK_N=config.block_n, SPLIT_K=config.split_k,
        NUM_STAGES=max(2, config.num_stages * MAX_CHUNK // step), OVERLAPS=overlaps,
        PREFETCHES=overlaps and n * k <= MAX_PREFETCHED_WEIGHTS, COMPILED=is_compiled(x), num_warps=config.num_warps,
        launch_pdl=overlaps,
    )  # fmt: skip
    return out


def write_out(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantize to (out, in) for GEMMs of many rows, with bfloat16 precision."""
    n, step = packed.words.shape[0], check_packed(packed)
    out = torch.empty(n, packed.num_columns, dtype=dtype, device=packed.words.device)
    _write_out_kernel[(triton.cdiv(n, DEQUANTIZED_ROWS), packed.num_columns // step)](
        packed.words, packed.words if packed.high is None else packed.high, packed.pairs.view(torch.int32), out, n,
        packed.num_columns // step, BITS=packed.bits, PAIR=packed.pair_columns, BLOCK_N=DEQUANTIZED_ROWS,
        COMPILED=is_compiled(out), num_warps=4,
    )  # fmt: skip
    return out
