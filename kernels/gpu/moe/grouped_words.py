"""Loops of grouped kernels over words of 4-bit weights: tiles of many rows, and one row with K sliced over warps.

`kernels/gpu/quantization/nibbles.py` computes a chunk of columns; the calling kernels choose rows and weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.quantization.nibbles import chunk_products, chunk_sums, split_row


@triton.jit
def _quarter(x_at, columns, has_x, X_COLUMNS: tl.constexpr):
    """Load columns of rows of x, transposed, for one nibble of a chunk. X_COLUMNS: see `packed_tile`."""
    if X_COLUMNS > 0:
        has_x = has_x & (columns < X_COLUMNS)
    return tl.trans(tl.load(x_at + columns, mask=has_x, other=0.0))


@triton.jit
def packed_tile(
    x_at, has_row, words_ptr, scales_ptr, weight_rows, up, inside, K, total, total_up,
    GATED: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr,
    EVEN: tl.constexpr, X_COLUMNS: tl.constexpr, NUM_STAGES: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Multiply packed weights by rows of x: (columns, rows) for `weight_rows`, and if GATED for those `up` further
    on.

    x_at: (rows, 1). weight_rows: int64 (columns,), which exist where `inside`. CHUNKS: per step of the loop.
    X_COLUMNS: of x if it has fewer than the weights; 0: equally many.
    """
    CHUNK: tl.constexpr = 4 * WORDS
    GROUPS: tl.constexpr = CHUNK // GROUP
    MANY_ROWS: tl.constexpr = x_at.shape[0] > max(16, GROUP // 4)  # scaling weights is then cheaper than scaling sums
    num_chunks = K // CHUNK
    offsets = tl.arange(0, WORDS)[None, :]
    word_at = words_ptr + weight_rows[:, None] * (num_chunks * WORDS) + offsets
    scale_at = scales_ptr + weight_rows * (num_chunks * GROUPS)
    up_words, up_scales = up * (num_chunks * WORDS), up * (num_chunks * GROUPS)
    none = tl.zeros(total.shape, tl.float32)
    for first in tl.range(0, num_chunks, CHUNKS, num_stages=NUM_STAGES):
        for step in tl.static_range(CHUNKS):
            chunk = first + step
            exists = inside & (chunk < num_chunks)
            has_x = has_row[:, None] if EVEN else has_row[:, None] & (chunk < num_chunks)
            x = (
                _quarter(x_at, chunk * CHUNK + offsets, has_x, X_COLUMNS),
                _quarter(x_at, chunk * CHUNK + WORDS + offsets, has_x, X_COLUMNS),
                _quarter(x_at, chunk * CHUNK + 2 * WORDS + offsets, has_x, X_COLUMNS),
                _quarter(x_at, chunk * CHUNK + 3 * WORDS + offsets, has_x, X_COLUMNS),
            )
            if EVEN:
                words = tl.load(word_at + chunk * WORDS)
            else:
                words = tl.load(word_at + chunk * WORDS, mask=exists[:, None], other=0)
            at = scale_at + chunk * GROUPS
            if MANY_ROWS:
                total = chunk_products(total, words, x, at, exists, FORMAT, GROUP, COMPILED)
            else:
                total = chunk_sums(total, words, x, at, exists, none, FORMAT, GROUP, COMPILED)
            if GATED:
                if EVEN:
                    words = tl.load(word_at + up_words + chunk * WORDS)
                else:
                    words = tl.load(word_at + up_words + chunk * WORDS, mask=exists[:, None], other=0)
                if MANY_ROWS:
                    total_up = chunk_products(total_up, words, x, at + up_scales, exists, FORMAT, GROUP, COMPILED)
                else:
                    total_up = chunk_sums(total_up, words, x, at + up_scales, exists, none, FORMAT, GROUP, COMPILED)
    return total, total_up


@triton.jit
def packed_row(
    x_at, norm_ptr, words_ptr, scales_ptr, weight_rows, up, inside, chunk_ids, K,
    GATED: tl.constexpr, HAS_NORM: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr,
    CHUNKS: tl.constexpr, EVEN: tl.constexpr, X_COLUMNS: tl.constexpr, NUM_STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Multiply packed weights by one row of x, or one per part: sums (parts, columns), those of `up`, squares of x.

    A part takes every CHUNKS-th chunk from its `chunk_ids`, (parts,), on: K is sliced over warps. x_at: (parts,).
    weight_rows, inside: (parts, columns), see `packed_tile`, as for X_COLUMNS. HAS_NORM: x is multiplied by the
    norm's weight.
    """
    CHUNK: tl.constexpr = 4 * WORDS
    GROUPS: tl.constexpr = CHUNK // GROUP
    PARTS: tl.constexpr = weight_rows.shape[0]
    num_chunks = K // CHUNK
    offsets = tl.arange(0, WORDS)[None, None, :]
    word_at = (
        words_ptr + weight_rows[:, :, None] * (num_chunks * WORDS) + (chunk_ids * WORDS)[:, None, None] + offsets
    )
    scale_at = scales_ptr + weight_rows * (num_chunks * GROUPS) + (chunk_ids * GROUPS)[:, None]
    up_words, up_scales = up * (num_chunks * WORDS), up * (num_chunks * GROUPS)
    columns_of_x = (chunk_ids * CHUNK)[:, None, None] + (tl.arange(0, 4) * WORDS)[None, :, None] + offsets
    none = tl.zeros((PARTS, weight_rows.shape[1], 1), tl.float32)
    total, total_up, squares = none, none, tl.zeros((PARTS, 4, WORDS), tl.float32)
    for first in tl.range(0, num_chunks, CHUNKS, num_stages=NUM_STAGES):
        exists = first + chunk_ids < num_chunks
        has_weight = inside & exists[:, None]
        has_x = exists[:, None, None]
        if X_COLUMNS > 0:
            has_x = has_x & (columns_of_x + first * CHUNK < X_COLUMNS)
        x = tl.load(x_at[:, None, None] + columns_of_x + first * CHUNK, mask=has_x, other=0.0)
        if HAS_NORM:
            at = norm_ptr + columns_of_x + first * CHUNK
            norm = tl.load(at, mask=has_x, other=0.0).to(tl.float32)
            squares += x.to(tl.float32) * x.to(tl.float32)
            x = (x.to(tl.float32) * norm).to(x.dtype)
        parts = split_row(x)
        if EVEN:
            words = tl.load(word_at + first * WORDS)
        else:
            words = tl.load(word_at + first * WORDS, mask=has_weight[:, :, None], other=0)
        at_scale = scale_at + first * GROUPS
        total = chunk_sums(total, words, parts, at_scale, has_weight, none, FORMAT, GROUP, COMPILED)
        if GATED:
            if EVEN:
                words = tl.load(word_at + up_words + first * WORDS)
            else:
                words = tl.load(word_at + up_words + first * WORDS, mask=has_weight[:, :, None], other=0)
            total_up = chunk_sums(
                total_up, words, parts, at_scale + up_scales, has_weight, none, FORMAT, GROUP, COMPILED
            )
    return tl.sum(total, axis=2), tl.sum(total_up, axis=2), tl.sum(tl.sum(squares, axis=2), axis=1)
