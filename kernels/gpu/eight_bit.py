"""What products over 8-bit weights share, int8 and e4m3 alike: rounding of rows, one row, several rows.

    codes_mk = round(x_mk / a_m),  a_m = max_k |x_mk| / MAX       `quantize_rows`
    y_mn = a_m s_n sum_k codes_mk w_nk + b_n                      `several_rows`, from codes or from plain x (a_m = 1)

`one_row` does all of it in one launch: W streams through registers, x is rounded on the way. It can take an RMS norm
before the product and a gate or the residual behind it. Rounding needs the row's largest value first: each program
looks for it, or finds it in `RowMax.of_input`, where the product before left the maximum of what it wrote.

References: `kernels/w8a8_gemm.py`, `kernels/fp8_gemm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8_gemm import FP8_DTYPE, FP8_MAX
from kernels.gpu.launch import overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.small_m_gemm import MAX_PREFETCHED, SmallMWorkspace
from kernels.w8a8_gemm import INT8_MAX

ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
E4M3_SHRINK = tl.constexpr(32.0)  # of rounded x, so that sums of four products stay below the largest float16
LINE = tl.constexpr(128)  # weights of a line of the L2 cache
TINY = tl.constexpr(1e-30)  # a row of zeros has codes of zero


@dataclass(frozen=True, slots=True)
class RowConfig:
    """block_n x block_k: the tile of W in a program's loop."""

    block_n: int
    block_k: int
    num_warps: int = 2
    num_stages: int = 4


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """block_m tokens x block_n outputs a program; split_k programs share a tile's K."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True, slots=True)
class RowMax:
    """Places for the largest |value| of a row, float32 (1,) each, so that a product need not look for it.

    of_input: max |x norm|. of_output: takes max |y output_norm| and must be zero before. cleared: is set to zero.
    """

    of_input: Tensor | None = None
    of_output: Tensor | None = None
    output_norm: Tensor | None = None
    cleared: Tensor | None = None


NO_ROW_MAX = RowMax()


@triton.jit
def dot_of_bytes(a, b, total, COMPILED: tl.constexpr):
    """total + the sum of four products of signed bytes."""
    if COMPILED:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for place in tl.static_range(4):
            total += ((a << (24 - 8 * place)) >> 24) * ((b << (24 - 8 * place)) >> 24)
    return total


@triton.jit
def dot_of_e4m3(words, x_low, x_high, total, COMPILED: tl.constexpr):
    """total + the sum of four products of e4m3 weights and `pair_of_e4m3`, whose products float16 holds exactly."""
    if COMPILED:
        total = tl.inline_asm_elementwise(
            """{
            .reg .b16 l, h; .reg .b32 a, b; .reg .f16 u, v; .reg .f32 f;
            mov.b32 {l, h}, $1;
            cvt.rn.f16x2.e4m3x2 a, l;
            cvt.rn.f16x2.e4m3x2 b, h;
            mul.rn.f16x2 a, a, $2;
            fma.rn.f16x2 a, b, $3, a;
            mov.b32 {u, v}, a;
            add.rn.f16 u, u, v;
            cvt.f32.f16 f, u;
            add.f32 $0, $4, f;
            }""",
            "=f,r,r,r,f", [words, x_low, x_high, total], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        for place in tl.static_range(4):
            weight = ((words >> (8 * place)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
            pair = x_low if place < 2 else x_high
            half = ((pair >> (16 * (place % 2))) & 65535).to(tl.uint16).to(tl.float16, bitcast=True)
            total += weight * half.to(tl.float32)
    return total


@triton.jit
def pair_of_e4m3(x, y, COMPILED: tl.constexpr):
    """Both rounded to e4m3, times 1 / E4M3_SHRINK, as two float16 in an int32."""
    if COMPILED:
        pair = tl.inline_asm_elementwise(
            """{
            .reg .b16 q; .reg .b32 h, s;
            cvt.rn.satfinite.e4m3x2.f32 q, $2, $1;
            cvt.rn.f16x2.e4m3x2 h, q;
            mov.b32 s, 0x28002800;
            mul.rn.f16x2 $0, h, s;
            }""",
            "=r,f,f", [x, y], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = (to_e4m3(x, COMPILED).to(tl.float32) / E4M3_SHRINK).to(tl.float16).to(tl.uint16, bitcast=True)
        high = (to_e4m3(y, COMPILED).to(tl.float32) / E4M3_SHRINK).to(tl.float16).to(tl.uint16, bitcast=True)
        pair = low.to(tl.int32) | (high.to(tl.int32) << 16)
    return pair


@triton.jit
def to_e4m3(x, COMPILED: tl.constexpr):
    """float32 to the nearest e4m3, ties to even; |x| <= 448. By hand in the interpreter, which rounds wrongly."""
    if not COMPILED:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)  # 2^-6; steps of 2^-9 below
    return x.to(tl.float8e4nv)


@triton.jit
def gated(y, up):
    small = tl.exp(-tl.abs(y))  # never overflows
    return y * tl.where(y >= 0, 1.0, small) / (1.0 + small) * up


@triton.jit
def _quantize_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, K, x_stride, MAX: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    ks = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + ks, mask=ks < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=0)
    x *= MAX / tl.maximum(largest, TINY)
    if MAX == 127.0:
        codes = (x + ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        codes = to_e4m3(x, COMPILED)
    tl.store(codes_ptr + row * K + ks, codes, mask=ks < K)
    tl.store(scales_ptr + row, largest / MAX)


@triton.jit
def _one_row_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, norm_ptr, out_ptr, in_max_ptr, out_max_ptr, out_norm_ptr, cleared_ptr,
    N, K, eps,
    MAX: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_IN_MAX: tl.constexpr, HAS_OUT_MAX: tl.constexpr, HAS_OUT_NORM: tl.constexpr, CLEARS: tl.constexpr,
    ADDS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_MAX: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCHES: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 4 if MAX > 0 else 1  # weights in an element of W, which is read as int32 where x is rounded
    STEP: tl.constexpr = BLOCK_K // WIDTH
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    elements = K // WIDTH
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * elements
    ahead = tl.minimum(tl.arange(0, 8) * (LINE // WIDTH), elements - 1)
    prefetch(weight_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * elements + ahead[None, :], PREFETCHES)
    wait_for_predecessor(OVERLAPS)
    largest = 1.0
    inverse = 1.0
    if MAX > 0:
        if HAS_IN_MAX:
            largest = tl.load(in_max_ptr, cache_modifier=".cg")
        else:
            maxima = tl.zeros((BLOCK_MAX,), tl.float32)
            for first in range(0, K, BLOCK_MAX):
                ks = first + tl.arange(0, BLOCK_MAX)
                value = tl.load(x_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
                if HAS_NORM:
                    value *= tl.load(norm_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
                maxima = tl.maximum(maxima, tl.abs(value))
            largest = tl.max(maxima, axis=0)
        inverse = MAX / tl.maximum(largest, TINY)
    total = tl.zeros((BLOCK_N, STEP), tl.int32 if MAX == 127.0 else tl.float32)
    total_up = tl.zeros((BLOCK_N, STEP), tl.int32 if MAX == 127.0 else tl.float32)
    if MAX > 0:
        squares = tl.zeros((STEP, 4), tl.float32)
    else:
        squares = tl.zeros((STEP,), tl.float32)
    for first in tl.range(0, elements, STEP, num_stages=NUM_STAGES):
        es = first + tl.arange(0, STEP)
        exists = inside[:, None] & (es < elements)[None, :]
        if EVEN:
            weight = tl.load(weight_rows + es[None, :], eviction_policy="evict_first")
        else:
            weight = tl.load(weight_rows + es[None, :], mask=exists, other=0.0)
        if GATED:  # rows N and on of the weight belong to `up`
            up_rows = weight_rows + N.to(tl.int64) * elements
            if EVEN:
                up_weight = tl.load(up_rows + es[None, :], eviction_policy="evict_first")
            else:
                up_weight = tl.load(up_rows + es[None, :], mask=exists, other=0)
        if MAX > 0:
            ks = es[:, None] * 4 + tl.arange(0, 4)[None, :]
        else:
            ks = es
        x = tl.load(x_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
        if MAX == 127.0:
            codes = (x * inverse + ROUNDING).to(tl.int32, bitcast=True) & 255
            word = tl.sum(codes << (tl.arange(0, 4) * 8)[None, :], axis=1)
            words = tl.broadcast_to(word[None, :], (BLOCK_N, STEP))
            total = dot_of_bytes(weight, words, total, COMPILED)
            if GATED:
                total_up = dot_of_bytes(up_weight, words, total_up, COMPILED)
        elif MAX > 0:
            even, odd = tl.split(tl.reshape(x * inverse, (STEP, 2, 2)))
            x_0, x_2 = tl.split(even)
            x_1, x_3 = tl.split(odd)
            lows = tl.broadcast_to(pair_of_e4m3(x_0, x_1, COMPILED)[None, :], (BLOCK_N, STEP))
            highs = tl.broadcast_to(pair_of_e4m3(x_2, x_3, COMPILED)[None, :], (BLOCK_N, STEP))
            total = dot_of_e4m3(weight, lows, highs, total, COMPILED)
            if GATED:
                total_up = dot_of_e4m3(up_weight, lows, highs, total_up, COMPILED)
        else:
            total += weight.to(tl.float32) * x[None, :]
            if GATED:
                total_up += up_weight.to(tl.float32) * x[None, :]
    scale = 1.0
    if MAX == 127.0:
        scale = largest / MAX
    elif MAX > 0:
        scale = largest * (E4M3_SHRINK / MAX)
    if HAS_NORM:
        scale *= tl.rsqrt(tl.sum(squares if MAX == 0 else tl.sum(squares, axis=1), axis=0) / K + eps)
    y = tl.sum(total, axis=1).to(tl.float32) * (scale * tl.load(scales_ptr + columns, mask=inside, other=0.0))
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(total_up, axis=1).to(tl.float32)
        up *= scale * tl.load(scales_ptr + N + columns, mask=inside, other=0.0)
        if HAS_BIAS:
            up += tl.load(bias_ptr + N + columns, mask=inside, other=0.0).to(tl.float32)
        y = gated(y, up)
    if ADDS:
        y += tl.load(out_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + columns, y, mask=inside)
    if HAS_OUT_MAX:
        value = tl.where(inside, y.to(tl.float32), 0.0)
        if HAS_OUT_NORM:
            value *= tl.load(out_norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.atomic_max(out_max_ptr, tl.max(tl.abs(value), axis=0), sem="relaxed")  # a maximum has no order
    if CLEARS and tl.program_id(0) == 0:
        tl.store(cleared_ptr, 0.0)


@triton.jit
def _several_rows_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, M, N, K, x_stride,
    HAS_X_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCHES: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    tile_m = tile % num_m  # neighbours share a tile of W and run together
    tile_n = tile // num_m
    split = tl.program_id(1)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (columns < N)[:, None]
    has_row = (rows < M)[:, None]
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    num_steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(num_steps, SPLIT_K)
    ahead = tl.minimum(split * share * BLOCK_K + tl.arange(0, 8) * LINE, K - 1)
    prefetch(weight_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + ahead[None, :], PREFETCHES)
    wait_for_predecessor(OVERLAPS)
    IS_INT: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if IS_INT else tl.float32)
    for step in tl.range(split * share, tl.minimum(split * share + share, num_steps), num_stages=NUM_STAGES):
        ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN:
            weight = tl.load(weight_rows + ks[None, :])
            x = tl.load(x_rows + ks[None, :], mask=has_row, other=0.0)
        else:
            weight = tl.load(weight_rows + ks[None, :], mask=inside & (ks < K)[None, :], other=0.0)
            x = tl.load(x_rows + ks[None, :], mask=has_row & (ks < K)[None, :], other=0.0)
        if IS_INT:
            total = tl.dot(weight, tl.trans(x), total, out_dtype=tl.int32)
        elif HAS_X_SCALES:  # matrix units add e4m3 products with 14 bits: a step's sum is added outside of them
            total = tl.dot(weight, tl.trans(x), total, max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(weight.to(x_ptr.dtype.element_ty), tl.trans(x), total, input_precision="ieee")

    places = tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_M)[None, :] * BLOCK_N
    exists = inside & (rows < M)[None, :]
    is_last = True
    if SPLIT_K > 1:
        base = partials_ptr + tile * (SPLIT_K * BLOCK_N * BLOCK_M)
        tl.store(base + split * (BLOCK_N * BLOCK_M) + places, total, mask=exists)
        tl.debug_barrier()  # all of the program's stores come before its one release below
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            tl.store(counters_ptr + tile, 0)
            total = tl.zeros((BLOCK_N, BLOCK_M), total.dtype)
            for part in tl.static_range(SPLIT_K):
                total += tl.load(
                    base + part * (BLOCK_N * BLOCK_M) + places, mask=exists, other=0, cache_modifier=".cg"
                )
    if is_last:
        y = total.to(tl.float32) * tl.load(scales_ptr + columns, mask=columns < N, other=0.0)[:, None]
        if HAS_X_SCALES:
            y *= tl.load(x_scales_ptr + rows, mask=rows < M, other=0.0)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        outputs = rows.to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=exists)


def choose_row(n: int, k: int, rounds_x: bool, is_gated: bool = False) -> RowConfig:
    """For one row and a weight (n, k) on an H200, by the sweeps of `bench_w8a8_gemm` and `bench_fp8_gemm`.

    With rounded x, reading W is the bound: 87 to 90% of read bandwidth for gate and up of Qwen2.5-7B, the output
    projection 95 to 99%. Plain x costs more instructions a weight: 69%.
    """
    if not rounds_x:
        return RowConfig(4, 1024, 2, 1) if k > 4 * n else RowConfig(4, 512, 2, 3)
    if is_gated or k > 4 * n:
        return RowConfig(8, 512, 1, 4)
    return RowConfig(8, 256, 1, 4)


def choose_rows(num_rows: int, n: int, k: int) -> RowsConfig:
    """For several rows, both operands of one byte, and a weight (n, k)."""
    block_m = max(16, 1 << (num_rows - 1).bit_length())
    if block_m <= 64:
        num_tiles = -(-n // 64)
        if num_tiles > 128:
            return RowsConfig(block_m, 64, 128, 1, num_warps=4, num_stages=6)
        return RowsConfig(block_m, 64, 256, 1 if k <= 4096 and n > k else 2, num_warps=4, num_stages=4)
    if num_rows <= 512 or n * num_rows < 1 << 24:
        return RowsConfig(128, 64, 128, 1, num_warps=4, num_stages=4)
    return RowsConfig(128, 256, 128, 1, num_warps=8, num_stages=3)


def code_max(weight: Tensor) -> float:
    """The largest code of activations that go with this weight."""
    return FP8_MAX if weight.dtype == FP8_DTYPE else INT8_MAX


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (rows, in), columns of stride 1 -> codes int8 or e4m3 (rows, in), contiguous, and float32 scales (rows,)."""
    num_rows, k = x.shape
    codes = torch.empty(num_rows, k, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        overlaps = overlaps_launches(x)
        block = triton.next_power_of_2(k)
        _quantize_rows_kernel[(num_rows,)](
            x, codes, scales, k, x.stride(0), MAX=code_max(codes), BLOCK=block, OVERLAPS=overlaps,
            COMPILED=x.is_cuda, num_warps=min(16, max(4, block // 1024)), launch_pdl=overlaps,
        )  # fmt: skip
    return codes, scales


def one_row(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, config: RowConfig, quantizes: bool,
    norm: Tensor | None = None, eps: float = 0.0, added_to: Tensor | None = None, is_gated: bool = False,
    row_max: RowMax = NO_ROW_MAX,
) -> Tensor:  # fmt: skip
    """One row through a whole step of a decoder: y = [silu(W_gate h) *] W h + b [+ added_to], h = x or its norm.

    x (1, in), contiguous. weight int8 or e4m3 (out, in), or (2 out, in) with the gate's rows first when `is_gated`;
    scales float32, one per row of it. quantizes: whether h is rounded, with one scale, to the weight's type.
    norm, eps, added_to: as in `small_m_gemm.gemv`. Returns (1, out) in the dtype of x.
    """
    n, k = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    if x.shape != (1, k) or not weight.is_contiguous():
        raise ValueError(f"one row of {k} and a contiguous weight are needed, x is {list(x.shape)}: too many rows?")
    if quantizes and k % 4:
        raise ValueError(f"{k} columns are not a multiple of 4")
    out = torch.empty(1, n, dtype=x.dtype, device=x.device) if added_to is None else added_to
    overlaps = overlaps_launches(x)
    _one_row_kernel[(triton.cdiv(n, config.block_n),)](
        x, weight.view(torch.int32) if quantizes else weight, scales, _or(bias, x), _or(norm, x), out,
        _or(row_max.of_input, scales), _or(row_max.of_output, scales), _or(row_max.output_norm, x),
        _or(row_max.cleared, scales), n, k, eps,
        MAX=code_max(weight) if quantizes else 0.0, HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None, HAS_IN_MAX=row_max.of_input is not None,
        HAS_OUT_MAX=row_max.of_output is not None, HAS_OUT_NORM=row_max.output_norm is not None,
        CLEARS=row_max.cleared is not None, ADDS=added_to is not None, GATED=is_gated,
        EVEN=n % config.block_n == 0 and k % config.block_k == 0, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        BLOCK_MAX=config.num_warps * 256, NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        PREFETCHES=overlaps and weight.numel() <= MAX_PREFETCHED, COMPILED=x.is_cuda, num_warps=config.num_warps,
        launch_pdl=overlaps,
    )  # fmt: skip
    return out


def several_rows(
    x: Tensor, x_scales: Tensor | None, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    workspace: SmallMWorkspace, config: RowsConfig,
) -> Tensor:  # fmt: skip
    """x (rows, in): codes with `x_scales` (rows,), or plain values; columns of stride 1. Returns (rows, out)."""
    num_rows, k = x.shape
    n = weight.shape[0]
    if not weight.is_contiguous():
        raise ValueError("the weight must be contiguous")
    out = torch.empty(num_rows, n, dtype=dtype, device=x.device)
    num_tiles = triton.cdiv(n, config.block_n) * triton.cdiv(num_rows, config.block_m)
    size = num_tiles * config.split_k * config.block_n * config.block_m
    if config.split_k > 1 and (size > workspace.partials.numel() or num_tiles > workspace.counters.numel()):
        raise ValueError(f"the workspace is too small for {size} partial sums of {num_tiles} tiles")
    partials = workspace.partials.view(torch.int32) if x.dtype == torch.int8 else workspace.partials
    overlaps = overlaps_launches(x)
    _several_rows_kernel[(num_tiles, config.split_k)](
        x, _or(x_scales, scales), weight, scales, _or(bias, scales), out, partials, workspace.counters,
        num_rows, n, k, x.stride(0),
        HAS_X_SCALES=x_scales is not None, HAS_BIAS=bias is not None,
        EVEN=n % config.block_n == 0 and k % config.block_k == 0, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, SPLIT_K=config.split_k, NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        PREFETCHES=overlaps and weight.numel() <= MAX_PREFETCHED, num_warps=config.num_warps, launch_pdl=overlaps,
    )  # fmt: skip
    return out


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer must be given even where the kernel does not use it."""
    return other if tensor is None else tensor
