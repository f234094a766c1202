"""What products over 8-bit weights share, int8 and e4m3 alike: rounding, products of several rows, of one row.

    codes_mk = round(x_mk / a_m),  a_m = max_k |x_mk| / MAX       `quantize_rows`, `norm_codes`, `silu_codes`
    y_mn = a_m s_n sum_k codes_mk w_nk + b_n                      `several_rows`, from codes or from plain x (a_m = 1)
    y_n = s_n sum_k x_k w_nk + b_n                                `one_row` of plain x, with norm, gate and residual

`several_rows` serves one row of codes too: a row of codes in registers (dot products of bytes, float16 pairs of e4m3)
took 71 us instead of 69 for the products of a layer of Qwen2.5-7B, and 98 where they followed each other in a model.
References: `kernels/w8a8_gemm.py`, `kernels/fp8_gemm.py`, `kernels/rms_norm.py`, `kernels/silu_mul.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8_gemm import FP8_DTYPE, FP8_MAX
from kernels.gpu.launch import overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.small_m_gemm import MAX_PREFETCHED, SmallMWorkspace
from kernels.w8a8_gemm import INT8_MAX

ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
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
def _store_codes(x, codes_ptr, scales_ptr, row, K, ks, MAX: tl.constexpr, COMPILED: tl.constexpr):
    """Round a row of float32, zero where it has no columns. NaN in x gives the scale NaN, which products pass on."""
    magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # in the order of |x|, NaN above all
    largest = tl.max(magnitudes, axis=0).to(tl.float32, bitcast=True)
    x *= MAX / tl.maximum(largest, TINY)
    if MAX == 127.0:
        codes = (x + ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        codes = to_e4m3(x, COMPILED)
    tl.store(codes_ptr + row * K + ks, codes, mask=ks < K)
    tl.store(scales_ptr + row, largest / MAX)


@triton.jit
def _quantize_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, K, x_stride, MAX: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    ks = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + ks, mask=ks < K, other=0.0).to(tl.float32)
    _store_codes(x, codes_ptr, scales_ptr, row, K, ks, MAX, COMPILED)


@triton.jit
def _norm_codes_kernel(
    x_ptr, residual_ptr, norm_ptr, codes_ptr, scales_ptr, K, eps, ADDS: tl.constexpr, MAX: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    ks = tl.arange(0, BLOCK)
    inside = ks < K
    norm = tl.load(norm_ptr + ks, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(residual_ptr + row * K + ks, mask=inside, other=0.0)
    dtype = value.dtype
    if ADDS:
        added = tl.load(x_ptr + row * K + ks, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(dtype)
        tl.store(residual_ptr + row * K + ks, value, mask=inside)
    value = value.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / K + eps) * norm
    _store_codes(value.to(dtype).to(tl.float32), codes_ptr, scales_ptr, row, K, ks, MAX, COMPILED)


@triton.jit
def _silu_codes_kernel(
    gate_up_ptr, codes_ptr, scales_ptr, K, MAX: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    ks = tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + row * 2 * K + ks, mask=ks < K, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * K + K + ks, mask=ks < K, other=0.0)
    value = gated(gate.to(tl.float32), up.to(tl.float32)).to(gate.dtype)
    _store_codes(value.to(tl.float32), codes_ptr, scales_ptr, row, K, ks, MAX, COMPILED)


@triton.jit
def _one_row_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, norm_ptr, out_ptr, N, K, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
    PREFETCHES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    ahead = tl.minimum(tl.arange(0, 8) * LINE, K - 1)
    prefetch(weight_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K + ahead[None, :], PREFETCHES)
    wait_for_predecessor(OVERLAPS)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        ks = first + tl.arange(0, BLOCK_K)
        exists = inside[:, None] & (ks < K)[None, :]
        if EVEN:
            weight = tl.load(weight_rows + ks[None, :], eviction_policy="evict_first")
        else:
            weight = tl.load(weight_rows + ks[None, :], mask=exists, other=0)
        x = tl.load(x_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
        if GATED:  # rows N and on of the weight belong to `up`
            up_rows = weight_rows + N.to(tl.int64) * K
            if EVEN:
                up_weight = tl.load(up_rows + ks[None, :], eviction_policy="evict_first")
            else:
                up_weight = tl.load(up_rows + ks[None, :], mask=exists, other=0)
            total_up += up_weight.to(tl.float32) * x[None, :]
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    y = tl.sum(total, axis=1) * (scale * tl.load(scales_ptr + columns, mask=inside, other=0.0))
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(total_up, axis=1) * (scale * tl.load(scales_ptr + N + columns, mask=inside, other=0.0))
        if HAS_BIAS:
            up += tl.load(bias_ptr + N + columns, mask=inside, other=0.0).to(tl.float32)
        y = gated(y, up)
    if ADDS:
        y += tl.load(out_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


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


def choose_row(n: int, k: int) -> RowConfig:
    """For one row of plain x and an int8 weight (n, k) on an H200; conversion of W bounds it: 69% of bandwidth."""
    return RowConfig(4, 1024, 2, 1) if k > 4 * n else RowConfig(4, 512, 2, 3)


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
    codes, scales = _empty_codes(x.shape[0], x.shape[1], dtype, x.device)
    if x.shape[0]:
        _quantize_rows_kernel[(x.shape[0],)](x, codes, scales, x.shape[1], x.stride(0), **_rounding_constants(codes))
    return codes, scales


def norm_codes(
    x: Tensor | None, residual: Tensor, norm: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Adds x, if given, to `residual` (rows, n) in place; codes and scales of the RMS norm of the sum."""
    if not residual.is_contiguous() or (x is not None and not x.is_contiguous()):
        raise ValueError("x and residual must be contiguous")
    codes, scales = _empty_codes(residual.shape[0], residual.shape[1], dtype, residual.device)
    if residual.shape[0]:
        _norm_codes_kernel[(residual.shape[0],)](
            _or(x, residual), residual, norm, codes, scales, residual.shape[1], eps, ADDS=x is not None,
            **_rounding_constants(codes),
        )  # fmt: skip
    return codes, scales


def silu_codes(gate_up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(rows, 2 n), gate first, contiguous -> codes (rows, n) of silu(gate) * up and scales (rows,)."""
    if not gate_up.is_contiguous():
        raise ValueError("gate_up must be contiguous")
    codes, scales = _empty_codes(gate_up.shape[0], gate_up.shape[1] // 2, dtype, gate_up.device)
    if gate_up.shape[0]:
        _silu_codes_kernel[(gate_up.shape[0],)](gate_up, codes, scales, codes.shape[1], **_rounding_constants(codes))
    return codes, scales


def _empty_codes(num_rows: int, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    scales = torch.empty(num_rows, dtype=torch.float32, device=device)
    return torch.empty(num_rows, n, dtype=dtype, device=device), scales


def _rounding_constants(codes: Tensor) -> dict[str, Any]:
    """One program holds a row."""
    block = triton.next_power_of_2(codes.shape[1])
    overlaps = overlaps_launches(codes)
    return {
        "MAX": code_max(codes), "BLOCK": block, "OVERLAPS": overlaps, "COMPILED": codes.is_cuda,
        "num_warps": min(16, max(4, block // 512)), "launch_pdl": overlaps,
    }  # fmt: skip


def one_row(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, config: RowConfig, norm: Tensor | None = None,
    eps: float = 0.0, added_to: Tensor | None = None, is_gated: bool = False,
) -> Tensor:  # fmt: skip
    """One row through a whole step of a decoder: y = [silu(W_gate h) *] W h + b [+ added_to], h = x or its norm.

    x (1, in), contiguous. weight int8 (out, in), or (2 out, in) with the gate's rows first when `is_gated`; scales
    float32, one per row of it. norm, eps, added_to: as in `small_m_gemm.gemv`. Returns (1, out) in the dtype of x.
    """
    n, k = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    if x.shape != (1, k) or not weight.is_contiguous():
        raise ValueError(f"one row of {k} and a contiguous weight are needed, x is {list(x.shape)}: too many rows?")
    out = torch.empty(1, n, dtype=x.dtype, device=x.device) if added_to is None else added_to
    overlaps = overlaps_launches(x)
    _one_row_kernel[(triton.cdiv(n, config.block_n),)](
        x, weight, scales, _or(bias, x), _or(norm, x), out, n, k, eps,
        HAS_BIAS=bias is not None, HAS_NORM=norm is not None, ADDS=added_to is not None, GATED=is_gated,
        EVEN=n % config.block_n == 0 and k % config.block_k == 0, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages, OVERLAPS=overlaps,
        PREFETCHES=overlaps and weight.numel() <= MAX_PREFETCHED, num_warps=config.num_warps, launch_pdl=overlaps,
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
