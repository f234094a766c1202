"""Linear maps over 4-bit weights on a GPU. Formula, layout and reference: `kernels/w4a16_gemm.py`.

One row: a code's bits, masked out where they stand, are a denormal float32, c 2^(4 i - 149) for place i up to 4. A
multiplication by x 2^(100 - 4 i) is exact in c and gives c x 2^-49: a mask and an FMA per weight, one shift per word.
Several rows: codes become weights in the dtype of x in registers and go through matrix units.
Many rows: the weight is written out in the dtype of x, for cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.gpu.launch import overlaps_launches, wait_for_predecessor
from kernels.gpu.small_m_gemm import SmallMWorkspace
from kernels.w4a16_gemm import PackedW4

MAX_ROWS = 64  # above, writing the weight out costs less than it saves


@dataclass(frozen=True, slots=True)
class W4Config:
    """block_n outputs x block_k columns: the tile of W in a program's loop; split_k only for several rows."""

    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4


ONE_ROW = W4Config(8, 512, num_warps=1, num_stages=1)  # half as long as with loads through shared memory


def choose(num_rows: int, n: int, k: int) -> W4Config | None:
    """For a weight (n, k) on an H200. None: many rows."""
    if num_rows == 1:
        return ONE_ROW if n > k else replace(ONE_ROW, block_n=4)
    if num_rows > MAX_ROWS:
        return None
    return W4Config(64, 128, 4 if n <= 128 * 64 else 1)


@triton.jit
def _one_row_kernel(
    x_pairs_ptr, words_ptr, pairs_ptr, bias_ptr, out_ptr, N, K, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = BLOCK_K // 8
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    num_words = K // 8
    num_groups = K // GROUP
    word_rows = words_ptr + columns.to(tl.int64)[:, None] * num_words
    pair_rows = pairs_ptr + columns.to(tl.int64)[:, None] * num_groups
    wait_for_predecessor(OVERLAPS)
    total = tl.zeros((BLOCK_N, STEP), tl.float32)
    for first in tl.range(0, num_words, STEP, num_stages=NUM_STAGES):
        at = first + tl.arange(0, STEP)
        exists = inside[:, None] & (at < num_words)[None, :]
        group = first * 8 // GROUP + tl.arange(0, BLOCK_K // GROUP)
        if EVEN:
            words = tl.load(word_rows + at[None, :], eviction_policy="evict_first")
            pairs = tl.load(pair_rows + group[None, :])
        else:
            words = tl.load(word_rows + at[None, :], mask=exists, other=0)
            pairs = tl.load(pair_rows + group[None, :], mask=inside[:, None] & (group < num_groups)[None, :], other=0)
        summed = tl.zeros((STEP,), tl.float32)
        codes = tl.zeros((BLOCK_N, STEP), tl.float32)  # sums of c x 2^-49
        upper = words >> 20
        for place in tl.static_range(8):
            if place % 2 == 0:
                two = tl.load(x_pairs_ptr + at * 4 + place // 2, mask=at < num_words, other=0)
                x = (two << 16).to(tl.float32, bitcast=True)  # bfloat16 is the upper half of a float32
            else:
                x = (two & -65536).to(tl.float32, bitcast=True)
            summed += x
            if place < 5:
                code = words & (15 << 4 * place)
                x *= 2.0 ** (100 - 4 * place)
            else:
                code = upper & (15 << 4 * (place - 5))
                x *= 2.0 ** (120 - 4 * place)
            codes += code.to(tl.float32, bitcast=True) * x[None, :]
        spread = tl.broadcast_to(pairs[:, :, None], (BLOCK_N, BLOCK_K // GROUP, GROUP // 8))
        pairs = tl.reshape(spread, (BLOCK_N, STEP))
        scale = (pairs << 16).to(tl.float32, bitcast=True)
        zero = (pairs & -65536).to(tl.float32, bitcast=True)
        total += scale * (codes * 2.0**49 - 8.0 * summed[None, :])
        total += zero * summed[None, :]
    y = tl.sum(total, axis=1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def unpacked(words, pairs, dtype: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Words and their groups' pairs (BLOCK_N, BLOCK_K / 8) -> weights (BLOCK_N, BLOCK_K)."""
    shifts = (tl.arange(0, 8) * 4)[None, None, :]
    scale = (pairs << 16).to(tl.float32, bitcast=True)[:, :, None]
    zero = (pairs & -65536).to(tl.float32, bitcast=True)[:, :, None]
    magic = ((words[:, :, None] >> shifts) & 15) | 0x4B000000  # the float 2^23 + c
    weights = (magic.to(tl.float32, bitcast=True) - 8388616.0) * scale + zero
    return tl.reshape(weights.to(dtype), (BLOCK_N, BLOCK_K))


@triton.jit
def code_at(words, upper, place: tl.constexpr):
    """The codes at `place` as float32. upper: words >> 20."""
    SHIFT: tl.constexpr = 4 * place if place < 5 else 4 * place - 20
    bits = ((words if place < 5 else upper) & (15 << SHIFT)) | 0x4B000000  # the float 2^23 + c 2^SHIFT
    return bits.to(tl.float32, bitcast=True) * 2.0**-SHIFT - 2.0 ** (23 - SHIFT)


@triton.jit
def _several_rows_kernel(
    x_ptr, words_ptr, pairs_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, M, N, K, x_stride,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    tile_n = tl.program_id(0)
    split = tl.program_id(1)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inside = (columns < N)[:, None]
    num_words = K // 8
    word_rows = words_ptr + columns.to(tl.int64)[:, None] * num_words
    pair_rows = pairs_ptr + columns.to(tl.int64)[:, None] * (K // GROUP)
    x_rows = x_ptr + rows[:, None] * x_stride
    num_steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(num_steps, SPLIT_K)
    wait_for_predecessor(OVERLAPS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(split * share, tl.minimum(split * share + share, num_steps), num_stages=NUM_STAGES):
        at = step * (BLOCK_K // 8) + tl.arange(0, BLOCK_K // 8)
        exists = inside & (at < num_words)[None, :]
        words = tl.load(word_rows + at[None, :], mask=exists, other=0)
        pairs = tl.load(pair_rows + ((at * 8) // GROUP)[None, :], mask=exists, other=0)
        scale = (pairs << 16).to(tl.float32, bitcast=True)
        zero = (pairs & -65536).to(tl.float32, bitcast=True) - 8.0 * scale
        has_x = (rows < M)[:, None] & (at < num_words)[None, :]
        upper = words >> 20
        for place in tl.static_range(8):
            weight = code_at(words, upper, place) * scale + zero
            x = tl.load(x_rows + place * num_words + at[None, :], mask=has_x, other=0.0)
            total = tl.dot(weight.to(x_ptr.dtype.element_ty), tl.trans(x), total, input_precision="ieee")

    places = tl.arange(0, BLOCK_N)[:, None] + rows[None, :] * BLOCK_N
    exists = inside & (rows < M)[None, :]
    is_last = True
    if SPLIT_K > 1:
        base = partials_ptr + tile_n * (SPLIT_K * BLOCK_N * BLOCK_M)
        tl.store(base + split * (BLOCK_N * BLOCK_M) + places, total, mask=exists)
        tl.debug_barrier()  # all of the program's stores come before its one release below
        is_last = tl.atomic_add(counters_ptr + tile_n, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            tl.store(counters_ptr + tile_n, 0)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in tl.static_range(SPLIT_K):
                total += tl.load(
                    base + part * (BLOCK_N * BLOCK_M) + places, mask=exists, other=0.0, cache_modifier=".cg"
                )
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + rows[None, :] * N + columns[:, None], total.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _dequantize_kernel(words_ptr, pairs_ptr, out_ptr, num_words, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    words = tl.load(words_ptr + row * num_words + at, mask=at < num_words, other=0)
    pairs = tl.load(pairs_ptr + row * (num_words * 8 // GROUP) + (at * 8) // GROUP, mask=at < num_words, other=0)
    ks = tl.program_id(0) * (BLOCK * 8) + tl.arange(0, BLOCK * 8)[None, :]
    weights = unpacked(words, pairs, out_ptr.dtype.element_ty, 1, BLOCK * 8)
    tl.store(out_ptr + row * num_words * 8 + ks, weights, mask=ks < num_words * 8)


def w4a16_linear(x: Tensor, packed: PackedW4, bias: Tensor | None, workspace: SmallMWorkspace,
                 config: W4Config | None = None) -> Tensor:  # fmt: skip
    """x (rows, in), columns of stride 1 -> (rows, out) in the dtype of x. Scales and offsets must be bfloat16."""
    num_rows, k = x.shape
    n = packed.words.shape[0]
    config = config or choose(num_rows, n, k)
    if config is None:
        return functional.linear(x, dequantize(packed, x.dtype), bias)
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    overlaps = overlaps_launches(x)
    pairs = packed.scales_and_zeros.view(torch.int32)
    num_tiles = triton.cdiv(n, config.block_n)
    constants = {
        "HAS_BIAS": bias is not None, "GROUP": packed.group_size, "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k, "NUM_STAGES": config.num_stages, "OVERLAPS": overlaps,
        "num_warps": config.num_warps, "launch_pdl": overlaps,
    }  # fmt: skip
    if num_rows == 1:
        if x.dtype != torch.bfloat16:
            raise ValueError(f"one row must be bfloat16, not {x.dtype}")
        even = n % config.block_n == 0 and k % config.block_k == 0
        _one_row_kernel[(num_tiles,)](
            x.view(torch.int32), packed.words, pairs, x if bias is None else bias, out, n, k, EVEN=even, **constants
        )
        return out
    block_m = max(16, triton.next_power_of_2(num_rows))
    size = num_tiles * config.split_k * config.block_n * block_m
    if config.split_k > 1 and (size > workspace.partials.numel() or num_tiles > workspace.counters.numel()):
        raise ValueError(f"the workspace is too small for {size} partial sums of {num_tiles} tiles")
    x = x.reshape(num_rows, k // 8, 8).transpose(1, 2).contiguous().view(num_rows, k)  # place by place, as in words
    _several_rows_kernel[(num_tiles, config.split_k)](
        x, packed.words, pairs, x if bias is None else bias, out, workspace.partials, workspace.counters,
        num_rows, n, k, x.stride(0), BLOCK_M=block_m, SPLIT_K=config.split_k, **constants,
    )  # fmt: skip
    return out


def dequantize(packed: PackedW4, dtype: torch.dtype) -> Tensor:
    """(out, in), for products of many rows."""
    n, num_words = packed.words.shape
    out = torch.empty(n, num_words * 8, dtype=dtype, device=packed.words.device)
    block = 256
    _dequantize_kernel[(triton.cdiv(num_words, block), n)](
        packed.words, packed.scales_and_zeros.view(torch.int32), out, num_words, GROUP=packed.group_size,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
