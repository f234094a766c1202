"""GEMMs of packed int4 weights in groups with rows of 16 bits, each two int8 planes: integers, group by group.

    y_mn = a_m sum_g (s_ng sum_{k in g} (w_nk - 8) x_mk + z_ng X_mg) + b_n;   X_mg = sum_{k in g} x_mk,  x = 256 h + l

`quantize_with_sums` of `kernels/gpu/quantization/quantize.py` makes x, a and X. A weight's four bits, moved to the
upper half of a byte and the first of them inverted, are the int8 16 (w - 8); the matrix units take them from
registers. Which rows and groups go this way, `kernels/gpu/quantization/w4a16_gemm.py` says: with small groups most of
the time is spent between dots.

Layout of the weights and reference: `kernels/quantization/w4a16_gemm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.gemm.split_k import SplitKWorkspace, reduce_splits
from kernels.gpu.launching.launch import is_compiled, overlaps_launches, wait_for_predecessor
from kernels.gpu.launching.launch_configs import TileConfig
from kernels.gpu.quantization.nibbles import scale_and_zero
from kernels.quantization.w4a16_gemm import MAX_CHUNK, PackedW4

WORDS = tl.constexpr(MAX_CHUNK // 4)  # of a chunk
MIN_GROUP = WORDS.value  # one nibble of neighbouring words shares a scale
UNPACK = tl.constexpr("""{
    .reg .b32 a, b;
    shl.b32 a, $4, 4;
    shl.b32 b, $5, 4;
    lop3.b32 a, a, 0xF0F0F0F0, 0x80808080, 0x6A;
    lop3.b32 b, b, 0xF0F0F0F0, 0x80808080, 0x6A;
    prmt.b32 $0, a, b, 0x6420;
    prmt.b32 $2, a, b, 0x7531;
    lop3.b32 a, $4, 0xF0F0F0F0, 0x80808080, 0x6A;
    lop3.b32 b, $5, 0xF0F0F0F0, 0x80808080, 0x6A;
    prmt.b32 $1, a, b, 0x6420;
    prmt.b32 $3, a, b, 0x7531;
}""")


@triton.jit
def unpack_to_int8(words):
    """16 (w - 8) of the four nibbles, int8."""
    return tl.inline_asm_elementwise(
        UNPACK, "=&r,=&r,=&r,=&r,r,r", [words], dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4
    )


@triton.jit
def unpack_to_int8_plain(words):
    """`unpack_to_int8` for the interpreter, which knows no assembly."""
    weights = ()
    for nibble in tl.static_range(4):
        weight = (((words.to(tl.int32) >> 4 * nibble) & 15) - 8) * 16
        weights = weights + (weight.to(tl.int8),)  # type: ignore[assignment]  # noqa: RUF005
    return weights


@triton.jit(do_not_specialize_on_alignment=["M"])
def _w4_planes_kernel(
    x_ptr, x_scales_ptr, sums_ptr, words_ptr, pairs_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, M, N,
    num_chunks,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = 4 * WORDS
    GROUPS: tl.constexpr = CHUNK // GROUP  # of a chunk
    num_m = tl.cdiv(2 * M, BLOCK_M)
    tile_m = tl.program_id(0) % num_m  # neighbours share a tile of W and run together
    columns = tl.program_id(0) // num_m * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    plane_rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tile_m * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
    offsets = tl.arange(0, WORDS)[None, :]
    num_words = num_chunks * WORDS  # in this form the compiler knows that rows start at 16 bytes
    word_at = words_ptr + columns.to(tl.int64)[:, None] * num_words + offsets
    pair_at = pairs_ptr + columns.to(tl.int64) * (num_chunks * GROUPS)
    x_at = x_ptr + plane_rows.to(tl.int64)[:, None] * (num_chunks * CHUNK) + offsets
    sum_at = sums_ptr + rows.to(tl.int64) * (num_chunks * GROUPS)
    has_plane = (plane_rows < 2 * M)[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    wait_for_predecessor(OVERLAPS)
    total = tl.zeros((BLOCK_N, BLOCK_M // 2), tl.float32)
    share = tl.cdiv(num_chunks, SPLIT_K)
    first = tl.program_id(1) * share
    for chunk in tl.range(first, tl.minimum(first + share, num_chunks), num_stages=NUM_STAGES):
        if EVEN:
            words = tl.load(word_at + chunk * WORDS)
        else:
            words = tl.load(word_at + chunk * WORDS, mask=inside[:, None], other=0)
        weights = unpack_to_int8(words) if COMPILED else unpack_to_int8_plain(words)
        for group in tl.static_range(GROUPS):
            dots = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
            for nibble in tl.static_range(group * 4 // GROUPS, (group + 1) * 4 // GROUPS):
                x = tl.load(x_at + chunk * CHUNK + nibble * WORDS, mask=has_plane, other=0)
                dots = tl.dot(weights[nibble], tl.trans(x), dots, out_dtype=tl.int32)
            high, low = tl.split(tl.reshape(dots, (BLOCK_N, BLOCK_M // 2, 2)))
            joined = (high * 256 + low).to(tl.float32)  # below 2^30: 128 columns of 128 x 32,639
            pairs = tl.load(pair_at + chunk * GROUPS + group, mask=inside, other=0)[:, None]
            sums = tl.load(sum_at + chunk * GROUPS + group, mask=rows < M, other=0.0)[None, :]
            scale, zero = scale_and_zero(pairs)
            total += zero * sums
            total += (scale * 0.0625) * joined
    exists = inside[:, None] & (rows < M)[None, :]
    is_last, y = reduce_splits(total, partials_ptr, counters_ptr, tl.program_id(0), tl.program_id(1), exists, SPLIT_K)
    if is_last:
        y *= tl.load(x_scales_ptr + rows, mask=rows < M, other=0.0)[None, :]
        if HAS_BIAS:
            y += bias
        outputs = out_ptr + rows.to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(outputs, y.to(out_ptr.dtype.element_ty), mask=exists)


def w4_planes_gemm(
    values: Tensor, x_scales: Tensor, sums: Tensor, packed: PackedW4, bias: Tensor | None, dtype: torch.dtype,
    workspace: SplitKWorkspace, config: TileConfig,
) -> Tensor:  # fmt: skip
    """values int8 (2 rows, in), contiguous; x_scales (rows,); sums (rows, groups). Returns (rows, out).

    The config's block_k is a chunk, 128.
    """
    num_rows, k = x_scales.shape[0], values.shape[1]
    n = packed.words.shape[0]
    if k % MAX_CHUNK or packed.group_size < MIN_GROUP:
        raise ValueError(f"{k} columns in groups of {packed.group_size}: multiples of {MAX_CHUNK} and {MIN_GROUP}")
    block_m = max(16, min(config.block_m, triton.next_power_of_2(2 * num_rows)))
    num_tiles = triton.cdiv(n, config.block_n) * triton.cdiv(2 * num_rows, block_m)
    workspace.check(num_tiles, config.block_n * block_m // 2, config.split_k)
    out = torch.empty(num_rows, n, dtype=dtype, device=values.device)
    overlaps = overlaps_launches(values)
    _w4_planes_kernel[(num_tiles, config.split_k)](
        values, x_scales, sums, packed.words, packed.scales_and_zeros.view(torch.int32),
        x_scales if bias is None else bias, out, workspace.partials, workspace.counters, num_rows, n, k // MAX_CHUNK,
        HAS_BIAS=bias is not None, GROUP=packed.group_size, EVEN=n % config.block_n == 0, BLOCK_M=block_m,
        BLOCK_N=config.block_n, SPLIT_K=config.split_k, NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        COMPILED=is_compiled(values), num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out
