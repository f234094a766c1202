"""GEMMs of packed weights of 4 to 6 bits, dequantized to bfloat16 in registers, and writing such weights out.

    y_mn = sum_k w_nk x_mk + b_n;   w = (q - 2^(bits - 1)) s + z

A tile of W is the M operand of `tl.dot`, read from registers, and x, padded to 16 rows, the N operand. The bits of q
under the exponent of 128 are the bfloat16 128 + q. A difference, which is exact, and a fused multiply-add make the
weight of it. It is rounded once, as where it is written out for cuBLAS, which is faster with many rows.

Layout and reference: `kernels/quantization/packed_weights.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.gpu.gemm.split_k import SplitKWorkspace, reduce_splits
from kernels.gpu.launching.launch import is_compiled, overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.launching.launch_configs import TileConfig
from kernels.gpu.launching.tuning import MAX_PREFETCHED_WEIGHTS, PACKED_TILES
from kernels.gpu.quantization.nibbles import scale_and_zero
from kernels.quantization.packed_weights import CHUNKS, STEPS, PackedWeight
from kernels.quantization.w4a16_gemm import MAX_CHUNK

MIN_PAIR_COLUMNS = 32
PREFETCHED = tl.constexpr(512)  # words of a row
LINE = tl.constexpr(64)  # words of a line of the L2 cache
DEQUANTIZED_ROWS = 32  # that a program writes out


@triton.constexpr_function
def words_of(bits: int) -> int:
    """Words of a chunk."""
    return CHUNKS[bits] // 4


@triton.constexpr_function
def chunks_of(bits: int) -> int:
    """Chunks of a step of K."""
    return STEPS[bits] // CHUNKS[bits]


@triton.constexpr_function
def assembly(bits: int, part: int) -> str:
    """Nibble `part` % 4 of two words, $1, with their pair, $2, and high bits, $4, as two weights of bfloat16."""
    width, up = bits - 4, 4 - (bits - 4) * part
    lines = [
        ".reg .b32 t, h, s, m;",
        f"shr.u32 t, $1, {part % 4 * 4};",
        "lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;",
    ]
    if width:
        lines += [f"shl.b32 h, $4, {up};" if up >= 0 else f"shr.u32 h, $4, {-up};"]
        lines += [f"lop3.b32 t, h, 0x{((1 << width) - 1) * 0x00100010:08X}, t, 0xEA;"]
    lines += [f"mov.b32 m, 0x{0x43004300 + (0x00010001 << bits - 1):08X};", "sub.rn.bf16x2 t, t, m;"]
    lines += [f"prmt.b32 s, $2, $2, 0x{3232 if bits == 6 and part % 2 else 1010};"]
    if bits == 6:
        lines += ["mul.rn.bf16x2 $0, t, s;"]
    else:
        lines += ["prmt.b32 m, $2, $2, 0x3232;", "fma.rn.bf16x2 $0, t, s, m;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def dequantize_part(words, high, pairs, BITS: tl.constexpr, PART: tl.constexpr, COMPILED: tl.constexpr):
    """Weights (columns, words) of nibble PART % 4 of chunk PART // 4 of a step; float32 where interpreted.

    words, high: (columns, words). pairs: (columns, 1).
    """
    if COMPILED:
        TEXT: tl.constexpr = assembly(BITS, PART)
        if BITS == 4:
            weights = tl.inline_asm_elementwise(
                TEXT, "=r,r,r,r", [words, pairs], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            weights = tl.inline_asm_elementwise(
                TEXT, "=r,r,r,r,r", [words, pairs, high.to(tl.int16)], dtype=tl.bfloat16, is_pure=True, pack=2
            )
    else:
        values = (words.to(tl.int32) >> PART % 4 * 4) & 15
        if BITS > 4:
            values |= ((high.to(tl.int32) >> (BITS - 4) * PART) & ((1 << BITS - 4) - 1)) << 4
        weights = (values - (1 << BITS - 1)).to(tl.float32)
        lower, upper = scale_and_zero(pairs)
        if BITS == 6:
            weights *= upper if PART % 2 else lower
        else:
            weights = weights * lower + upper
    return weights


@triton.jit(do_not_specialize_on_alignment=["M"])
def _packed_kernel(
    x_ptr, words_ptr, high_ptr, pairs_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, M, N, num_steps, x_stride,
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, PAIR: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
    PREFETCHES: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """PAIR: columns of a pair."""
    WORDS: tl.constexpr = words_of(BITS)
    CHUNKS: tl.constexpr = chunks_of(BITS)
    STEP: tl.constexpr = CHUNKS * 4 * WORDS
    PARTS: tl.constexpr = PAIR // WORDS  # nibbles that share a pair
    num_m = tl.cdiv(M, BLOCK_M)
    tile_m = tl.program_id(0) % num_m  # neighbours share a tile of W and run together
    columns = tl.program_id(0) // num_m * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    has_row = (rows < M)[:, None]
    offsets = tl.arange(0, WORDS)[None, :]
    row_words = num_steps * (CHUNKS * WORDS)  # in this form the compiler knows that rows start at 16 bytes
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
        if BITS > 4 and EVEN:
            high = tl.load(high_at + step * WORDS)
        elif BITS > 4:
            high = tl.load(high_at + step * WORDS, mask=inside[:, None], other=0)
        for chunk in tl.static_range(CHUNKS):
            if EVEN:
                words = tl.load(word_at + (step * CHUNKS + chunk) * WORDS)
            else:
                words = tl.load(word_at + (step * CHUNKS + chunk) * WORDS, mask=inside[:, None], other=0)
            for part in tl.static_range(chunk * 4, chunk * 4 + 4):
                pairs = tl.load(pair_at + step * (STEP // PAIR) + part // PARTS, mask=inside, other=0)[:, None]
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
    """A program writes a step of several rows."""
    WORDS: tl.constexpr = words_of(BITS)
    CHUNKS: tl.constexpr = chunks_of(BITS)
    STEP: tl.constexpr = CHUNKS * 4 * WORDS
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    at = rows.to(tl.int64) * num_steps + tl.program_id(1)
    offsets = tl.arange(0, WORDS)[None, :]
    high = 0
    if BITS > 4:
        high = tl.load(high_ptr + at[:, None] * WORDS + offsets, mask=inside[:, None], other=0)
    for chunk in tl.static_range(CHUNKS):
        words_at = (at[:, None] * CHUNKS + chunk) * WORDS + offsets
        words = tl.load(words_ptr + words_at, mask=inside[:, None], other=0)
        for part in tl.static_range(chunk * 4, chunk * 4 + 4):
            pairs = tl.load(pairs_ptr + at * (STEP // PAIR) + part * WORDS // PAIR, mask=inside, other=0)[:, None]
            weights = dequantize_part(words, high, pairs, BITS, part, COMPILED)
            outputs = out_ptr + at[:, None] * STEP + part * WORDS + offsets
            tl.store(outputs, weights.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def packed_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, workspace: SplitKWorkspace) -> Tensor:
    """x (rows, in), columns of stride 1 -> (rows, out) in the dtype of x, by the faster way."""
    if x.dtype == torch.bfloat16:
        config = PACKED_TILES.find(x.shape[0], packed.words.shape[0], x.shape[1])
        if config is not None:
            return packed_gemm(x, packed, bias, workspace, config)
    return functional.linear(x, write_out(packed, x.dtype), bias)


def packed_gemm(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, workspace: SplitKWorkspace, config: TileConfig
) -> Tensor:
    """x (rows, in), bfloat16, columns of stride 1 -> (rows, out).

    The config's stages are of 128 columns, as many as its block_k.
    """
    (num_rows, k), n = x.shape, packed.words.shape[0]
    step = check(packed)
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
    """(out, in), for GEMMs of many rows; of bfloat16 precision."""
    n, step = packed.words.shape[0], check(packed)
    out = torch.empty(n, packed.num_columns, dtype=dtype, device=packed.words.device)
    _write_out_kernel[(triton.cdiv(n, DEQUANTIZED_ROWS), packed.num_columns // step)](
        packed.words, packed.words if packed.high is None else packed.high, packed.pairs.view(torch.int32), out, n,
        packed.num_columns // step, BITS=packed.bits, PAIR=packed.pair_columns, BLOCK_N=DEQUANTIZED_ROWS,
        COMPILED=is_compiled(out), num_warps=4,
    )  # fmt: skip
    return out


def check(packed: PackedWeight) -> int:
    """Columns of a step of K. Raises ValueError for columns or pairs that the kernels do not take."""
    step = STEPS[packed.bits]
    if packed.num_columns % step or packed.pair_columns < MIN_PAIR_COLUMNS:
        raise ValueError(
            f"{packed.num_columns} columns, {packed.pair_columns} to a pair: they take multiples of {step} and at "
            f"least {MIN_PAIR_COLUMNS}"
        )
    return step
