"""GEMMs of few bfloat16 rows with packed weights of 2 to 6 bits, see `kernels/quantization/packed_weights.py`.

The tensor cores multiply unpacked, unscaled weights, part by part of the words, and sums of groups are scaled. The
contribution of 128 and the zero is a multiple of the sum of x, which the tensor cores compute, too. Per group

    y += s (sum_k (128 + q_k) x_k) + (z - (128 + middle) s) sum_k x_k

in float32; symmetric weights are q - middle and need no such sum. A program computes few columns of y over all of K:
each warp takes another K step, and their sums are added at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import is_compiled, overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.quantization.nibbles import scale_and_zero, split_row
from kernels.gpu.quantization.packed_parts import (
    check_packed,
    chunks_of,
    high_bits_of,
    is_symmetric,
    middle_of,
    parts_of,
    unpack_chunk,
    words_of,
)
from kernels.gpu.quantization.quantized_tuning import SlicedKConfig
from kernels.quantization.packed_weights import PackedWeight

MAX_ROWS = 32
LINE = tl.constexpr(64)  # words per line of the L2 cache


@triton.jit
def _load_parts(x_at, has_x, PARTS: tl.constexpr):
    """Load x for the parts of chunks, each (chunks, words, rows). x_at: of the first part, (chunks, rows, words)."""
    WORDS: tl.constexpr = x_at.shape[2]
    parts = ()
    if x_at.shape[1] > 1:
        for part in tl.static_range(PARTS):
            x = tl.load(x_at + part * WORDS, mask=has_x, other=0.0)
            parts = parts + (tl.permute(x, (0, 2, 1)),)  # type: ignore[assignment]  # noqa: RUF005
    else:  # one load for all parts
        x = tl.load(x_at + (tl.arange(0, PARTS) * WORDS)[None, :, None], mask=has_x, other=0.0)
        if PARTS == 8:
            even, odd = tl.split(tl.reshape(tl.permute(x, (0, 2, 1)), (x.shape[0], WORDS, 4, 2)))
            e0, e1, e2, e3 = split_row(tl.permute(even, (0, 2, 1)))
            o0, o1, o2, o3 = split_row(tl.permute(odd, (0, 2, 1)))
            parts = (e0, o0, e1, o1, e2, o2, e3, o3)  # type: ignore[assignment]
        else:
            parts = split_row(x)
    return parts


@triton.jit
def _load_step(word_at, high_at, step, exists, BITS: tl.constexpr):
    """Load the words of each chunk of `step` and the steps after it, one per warp: (steps, columns, words); then high
    bits.

    exists: None if all do.
    """
    WORDS: tl.constexpr = words_of(BITS)
    loaded = ()
    for chunk in tl.static_range(chunks_of(BITS)):
        at = word_at + (step * chunks_of(BITS) + chunk) * WORDS
        words = tl.load(at) if exists is None else tl.load(at, mask=exists, other=0)
        loaded = loaded + (words,)  # type: ignore[assignment]  # noqa: RUF005
    high = 0
    if high_bits_of(BITS) > 0:
        at = high_at + step * WORDS
        high = tl.load(at) if exists is None else tl.load(at, mask=exists, other=0)
    return loaded + (high,)  # noqa: RUF005


@triton.jit
def _step_products(
    loaded, x_at, pair_at, has_x, has_pair, BITS: tl.constexpr, PAIR: tl.constexpr, COMPILED: tl.constexpr
):
    """Multiply one step per warp by all rows of x: (steps, columns, rows). loaded: see `_load_step`."""
    WORDS: tl.constexpr = words_of(BITS)
    PARTS: tl.constexpr = parts_of(BITS)
    SHARING: tl.constexpr = PAIR // WORDS  # parts that share a pair
    GROUP: tl.constexpr = SHARING // 2 if is_symmetric(BITS) else SHARING  # parts that share a scale
    MIDDLE: tl.constexpr = middle_of(BITS, COMPILED)
    none = tl.zeros((loaded[0].shape[0], loaded[0].shape[1], x_at.shape[1]), tl.float32)
    total = none
    for chunk in tl.static_range(chunks_of(BITS)):
        x = _load_parts(x_at + chunk * PARTS * WORDS, has_x, PARTS)
        weights = unpack_chunk(loaded[chunk], loaded[chunks_of(BITS)], BITS, chunk, COMPILED)
        for first in tl.static_range(0, PARTS, GROUP):
            dots = none
            sums = none
            for part in tl.static_range(first, first + GROUP):
                operand = x[part].to(weights[part].dtype)
                dots = tl.dot(weights[part], operand, dots, input_precision="ieee")
                if not is_symmetric(BITS):
                    ones = tl.full(loaded[chunk].shape, 1.0, operand.dtype)
                    sums = tl.dot(ones, operand, sums, input_precision="ieee")
            pairs = tl.load(pair_at + (chunk * PARTS + first) // SHARING, mask=has_pair, other=0)
            lower, upper = scale_and_zero(tl.expand_dims(pairs, 2))
            if is_symmetric(BITS):
                total += (upper if first % SHARING else lower) * dots
            else:
                total += lower * dots + (upper - MIDDLE * lower) * sums
    return total


@triton.jit(do_not_specialize_on_alignment=["M"])
def _rows_kernel(
    x_ptr, words_ptr, high_ptr, pairs_ptr, bias_ptr, out_ptr, M, N, num_steps, x_stride,
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, PAIR: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, PREFETCHED: tl.constexpr,
    NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """PAIR: columns per pair. STEPS: K steps at a time, one per warp."""
    WORDS: tl.constexpr = words_of(BITS)
    STEP_WORDS: tl.constexpr = chunks_of(BITS) * WORDS
    STEP: tl.constexpr = parts_of(BITS) * STEP_WORDS
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    rows = tl.arange(0, BLOCK_M)
    step_ids = tl.arange(0, STEPS)
    num_words = num_steps * STEP_WORDS  # in this form the compiler knows that rows are 16-byte aligned
    word_rows = words_ptr + columns.to(tl.int64)[None, :, None] * num_words
    word_at = word_rows + (step_ids * STEP_WORDS)[:, None, None] + tl.arange(0, WORDS)[None, None, :]
    high_rows = high_ptr + columns.to(tl.int64)[None, :, None] * (num_steps * WORDS)
    high_at = high_rows + (step_ids * WORDS)[:, None, None] + tl.arange(0, WORDS)[None, None, :]
    pair_at = (
        pairs_ptr
        + columns.to(tl.int64)[None, :] * (num_steps * (STEP // PAIR))
        + (step_ids * (STEP // PAIR))[:, None]
    )
    x_at = x_ptr + rows.to(tl.int64)[None, :, None] * x_stride + (step_ids * STEP)[:, None, None]
    x_at = x_at + tl.arange(0, WORDS)[None, None, :]
    has_row = (rows < M)[None, :, None]
    if PREFETCHED > 0:
        lines = tl.minimum(AHEAD * STEPS * STEP_WORDS + tl.arange(0, PREFETCHED) * LINE, num_words - 1)
        prefetch(
            words_ptr + tl.where(inside, columns, 0).to(tl.int64)[:, None] * num_words + lines[None, :], OVERLAPS
        )
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    ahead = ()
    for turn in tl.static_range(AHEAD):
        exists = (turn * STEPS + step_ids < num_steps)[:, None, None] & inside[None, :, None]
        ahead = ahead + (_load_step(word_at, high_at, turn * STEPS, exists, BITS),)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_predecessor(OVERLAPS)
    total = tl.zeros((STEPS, BLOCK_N, BLOCK_M), tl.float32)
    for turn in tl.static_range(AHEAD):
        exists = turn * STEPS + step_ids < num_steps
        total += _step_products(
            ahead[turn], x_at + turn * STEPS * STEP, pair_at + turn * STEPS * (STEP // PAIR),
            has_row & exists[:, None, None], inside[None, :] & exists[:, None], BITS, PAIR, COMPILED,
        )  # fmt: skip
    for first in tl.range(AHEAD * STEPS, num_steps, STEPS, num_stages=NUM_STAGES):
        exists = first + step_ids < num_steps
        if EVEN:
            loaded = _load_step(word_at, high_at, first, None, BITS)
            has_x, has_pair = has_row, (columns >= 0)[None, :]
        else:
            loaded = _load_step(word_at, high_at, first, exists[:, None, None] & inside[None, :, None], BITS)
            has_x, has_pair = has_row & exists[:, None, None], inside[None, :] & exists[:, None]
        total += _step_products(
            loaded, x_at + first * STEP, pair_at + first * (STEP // PAIR), has_x, has_pair, BITS, PAIR, COMPILED
        )
    y = tl.sum(total, axis=0)
    if HAS_BIAS:
        y += bias
    outputs = out_ptr + rows.to(tl.int64)[None, :] * N + columns[:, None]
    tl.store(outputs, y.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (rows < M)[None, :])


def packed_rows_gemm(x: Tensor, packed: PackedWeight, bias: Tensor | None, config: SlicedKConfig) -> Tensor:
    """Multiply x (up to 32 rows, in), bfloat16, columns of stride 1 -> (rows, out). config: block_k is of 4 bits."""
    (num_rows, k), n, packing = x.shape, packed.words.shape[0], packed.packing
    check_packed(packed)
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows are too many: at most {MAX_ROWS}")
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    overlaps = overlaps_launches(x)
    num_turns, rest = divmod(k // packing.step, config.num_warps)
    _rows_kernel[(triton.cdiv(n, config.block_n),)](
        x, packed.words, packed.words if packed.high is None else packed.high, packed.pairs.view(torch.int32),
        x if bias is None else bias, out, num_rows, n, k // packing.step, x.stride(0),
        HAS_BIAS=bias is not None, BITS=packed.bits, PAIR=packed.pair_columns,
        EVEN=n % config.block_n == 0 and not rest,
        BLOCK_M=1 if num_rows == 1 else max(8, triton.next_power_of_2(num_rows)), BLOCK_N=config.block_n,
        STEPS=config.num_warps, AHEAD=min(config.ahead, num_turns), PREFETCHED=config.prefetched if overlaps else 0,
        NUM_STAGES=config.num_stages, OVERLAPS=overlaps, COMPILED=is_compiled(x), num_warps=config.num_warps,
        launch_pdl=overlaps,
    )  # fmt: skip
    return out
