"""The products of a decoder layer for few rows, with norms, rotary embedding, KV write, gate and residual inside.

    rotated_qkv:  q, k, v = rope(norm(r) W^T + b); k and v go to the paged pool       one kernel
    gated:        silu(norm(r) W_gate^T) * (norm(r) W_up^T)                            one kernel
    add_product:  r += x W^T + b                                                       one kernel

A norm needs the whole row before it can scale it, but scaling a row commutes with the product. So what changes the
residual r also leaves r * (weight of the norm that follows) and, tile by tile, sums of squares; the product that
follows multiplies the former and scales its result by rsqrt(mean of squares + eps).

As in `small_m_gemm`, a tile of W is the M operand of `tl.dot` and x, padded to a power of two, the N operand. A
program may hold two tiles of W: gate and up of the same columns, or the two halves of a head, which rotation mixes.
Narrow W does not give every multiprocessor a tile, so K can be split; the last split to finish adds the partial sums
in the order of the splits. The result depends on neither timing nor padding rows.

References: the plain kernels that each product replaces. `choose_few_rows` knows the fastest settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import overlaps_launches, prefetch, wait_for_predecessor
from kernels.gpu.small_m_gemm import LINE, MAX_PREFETCHED, SmallMConfig, SmallMWorkspace

MAX_FEW_ROWS = 128
MAX_BLOCK_M = 32  # beyond, the partial sums and the rotation cost more than reading a tile of W twice


def choose_few_rows(num_rows: int, n: int, k: int, dtype: torch.dtype, is_pair: bool) -> SmallMConfig:
    """Settings for W (n, k) on an H200; `is_pair`: for `gated` and `rotated_qkv`, which hold two tiles of W."""
    if dtype.itemsize > 2:
        return SmallMConfig(32, 32, 2, 4, 2)
    if not is_pair:
        return SmallMConfig(64, 128, 4, num_stages=4)
    if n >= 3 * k:  # gate and up
        return SmallMConfig(64, 128, num_stages=4) if num_rows <= 16 else SmallMConfig(64, 64, num_stages=3)
    return SmallMConfig(64, 128, 2, num_stages=4) if k <= 2048 else SmallMConfig(64, 64, 2, num_stages=6)


@dataclass(slots=True)
class Residual:
    """The residual of a step's rows and what its next norm needs.

    value: (rows, hidden). scaled: the same times the next norm's weight. squares: float32 (rows, parts), sums of
    squares of parts of each row; num_parts of them count.
    """

    value: Tensor
    scaled: Tensor
    squares: Tensor
    num_parts: int


@triton.jit
def _tile_sums(
    x_ptr, weight_ptr, rows, columns, inside, other, M, K, x_stride, split,
    PAIR: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCHES: tl.constexpr,
):  # fmt: skip
    """Sums over this split's K of W rows `columns`, and `columns + other`, times x: two (BLOCK_N, BLOCK_M)."""
    has_row = (rows < M)[:, None]
    num_tiles = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(num_tiles, SPLIT_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * K
    other_rows = weight_rows + other.to(tl.int64) * K
    ahead = tl.minimum(split * share * BLOCK_K + tl.arange(0, 16) * LINE, K - 1)
    kept = inside & (ahead < K)[None, :]
    prefetch(tl.where(kept, weight_rows + ahead[None, :], weight_ptr), PREFETCHES)
    if PAIR:
        prefetch(tl.where(kept, other_rows + ahead[None, :], weight_ptr), PREFETCHES)
    wait_for_predecessor(OVERLAPS)
    for tile in tl.range(split * share, tl.minimum(split * share + share, num_tiles), num_stages=NUM_STAGES):
        ks = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN:
            x = tl.load(x_rows + ks[None, :], mask=has_row, other=0.0)
            total = tl.dot(tl.load(weight_rows + ks[None, :]), tl.trans(x), total, input_precision="ieee")
            if PAIR:
                second = tl.dot(tl.load(other_rows + ks[None, :]), tl.trans(x), second, input_precision="ieee")
        else:
            exists = inside & (ks < K)[None, :]
            x = tl.load(x_rows + ks[None, :], mask=has_row & (ks < K)[None, :], other=0.0)
            a = tl.load(weight_rows + ks[None, :], mask=exists, other=0.0)
            total = tl.dot(a, tl.trans(x), total, input_precision="ieee")
            if PAIR:
                b = tl.load(other_rows + ks[None, :], mask=exists, other=0.0)
                second = tl.dot(b, tl.trans(x), second, input_precision="ieee")
    return total, second


@triton.jit
def _over_splits(
    total, second, partials_ptr, counters_ptr, split,
    PAIR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """(whether this program is the tile's last, sums over all splits if it is)."""
    is_last = True
    if SPLIT_K > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        size: tl.constexpr = BLOCK_N * BLOCK_M
        count: tl.constexpr = 2 if PAIR else 1
        places = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        base = partials_ptr + tile * (SPLIT_K * count * size) + places
        tl.store(base + split * (count * size), total)
        if PAIR:
            tl.store(base + split * (count * size) + size, second)
        tl.debug_barrier()  # all of the program's stores come before its one release below
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            tl.store(counters_ptr + tile, 0)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            second = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in tl.static_range(SPLIT_K):
                total += tl.load(base + part * (count * size), cache_modifier=".cg")
                if PAIR:
                    second += tl.load(base + part * (count * size) + size, cache_modifier=".cg")
    return is_last, total, second


@triton.jit
def _row_squares(squares_ptr, rows, num_parts, M, PARTS: tl.constexpr):
    """(BLOCK_M, PARTS)"""
    parts = tl.arange(0, PARTS)
    exists = (rows < M)[:, None] & (parts < num_parts)[None, :]
    return tl.load(squares_ptr + rows[:, None] * num_parts + parts[None, :], mask=exists, other=0.0)


@triton.jit(do_not_specialize=["M", "num_parts"])
def _gated_kernel(
    x_ptr, weight_ptr, bias_ptr, squares_ptr, out_ptr, partials_ptr, counters_ptr, M, N, K, x_stride, num_parts, eps,
    HAS_BIAS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
    PREFETCHES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (columns < N)[:, None]
    split = tl.program_id(2)
    gate, up = _tile_sums(
        x_ptr, weight_ptr, rows, columns, inside, N, M, K, x_stride, split,
        True, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, NUM_STAGES, OVERLAPS, PREFETCHES,
    )  # fmt: skip
    squares = _row_squares(squares_ptr, rows, num_parts, M, PARTS)
    is_last, gate, up = _over_splits(
        gate, up, partials_ptr, counters_ptr, split, True, BLOCK_M, BLOCK_N, SPLIT_K
    )  # fmt: skip
    if is_last:
        scale = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[None, :]
        gate *= scale
        up *= scale
        if HAS_BIAS:
            gate += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias_ptr + N + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        small = tl.exp(-tl.abs(gate))  # never overflows
        y = gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small) * up
        out = out_ptr + rows.to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside & (rows < M)[None, :])


@triton.jit(do_not_specialize=["M"])
def _add_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, norm_ptr, scaled_ptr, squares_ptr, partials_ptr, counters_ptr,
    M, N, K, x_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCHES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (columns < N)[:, None]
    split = tl.program_id(2)
    y, _ = _tile_sums(
        x_ptr, weight_ptr, rows, columns, inside, N, M, K, x_stride, split,
        False, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, NUM_STAGES, OVERLAPS, PREFETCHES,
    )  # fmt: skip
    is_last, y, _ = _over_splits(y, y, partials_ptr, counters_ptr, split, False, BLOCK_M, BLOCK_N, SPLIT_K)
    if is_last:
        if HAS_BIAS:
            y += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        exists = inside & (rows < M)[None, :]
        places = rows.to(tl.int64)[None, :] * N + columns[:, None]
        y += tl.load(residual_ptr + places, mask=exists, other=0.0).to(tl.float32)
        rounded = y.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + places, rounded, mask=exists)
        y = rounded.to(tl.float32)
        norm = tl.load(norm_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + places, (y * norm[:, None]).to(scaled_ptr.dtype.element_ty), mask=exists)
        tl.store(squares_ptr + rows * tl.num_programs(1) + tile, tl.sum(y * y, axis=0), mask=rows < M)


@triton.jit(do_not_specialize=["M", "num_parts", "layer"])
def _rotated_qkv_kernel(
    x_ptr, weight_ptr, bias_ptr, squares_ptr, out_ptr, partials_ptr, counters_ptr, M, K, x_stride, num_parts, eps,
    table_ptr, positions_ptr, slots_ptr, qk_norm_ptr, pool_ptr, layer, block_stride, layer_stride,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCHES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_N)
    columns = head * HEAD_DIM + dims
    inside = (dims < HALF)[:, None]
    split = tl.program_id(2)
    half = head * 0 + HALF
    a, b = _tile_sums(
        x_ptr, weight_ptr, rows, columns, inside, half, M, K, x_stride, split,
        True, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, NUM_STAGES, OVERLAPS, PREFETCHES,
    )  # fmt: skip
    squares = _row_squares(squares_ptr, rows, num_parts, M, PARTS)
    is_last, a, b = _over_splits(a, b, partials_ptr, counters_ptr, split, True, BLOCK_M, BLOCK_N, SPLIT_K)
    if is_last:
        exists = inside & (rows < M)[None, :]
        scale = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[None, :]
        a *= scale
        b *= scale
        if HAS_BIAS:
            a += tl.load(bias_ptr + columns, mask=dims < HALF, other=0.0).to(tl.float32)[:, None]
            b += tl.load(bias_ptr + columns + HALF, mask=dims < HALF, other=0.0).to(tl.float32)[:, None]
        if head < NUM_HEADS + NUM_KV_HEADS:
            if HAS_NORM:  # rows of W beyond the head count as zeros
                square = tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)
                scale = tl.rsqrt(square / HEAD_DIM + eps)[None, :]
                norm = qk_norm_ptr + columns
                a *= scale * tl.load(norm, mask=dims < HALF, other=0.0).to(tl.float32)[:, None]
                b *= scale * tl.load(norm + HALF, mask=dims < HALF, other=0.0).to(tl.float32)[:, None]
            positions = tl.load(positions_ptr + rows, mask=rows < M, other=0).to(tl.int64)
            entry = table_ptr + positions[None, :] * (2 * HEAD_DIM) + dims[:, None]
            cos_a = tl.load(entry, mask=exists, other=0.0).to(tl.float32)
            cos_b = tl.load(entry + HALF, mask=exists, other=0.0).to(tl.float32)
            sin_a = tl.load(entry + HEAD_DIM, mask=exists, other=0.0).to(tl.float32)
            sin_b = tl.load(entry + HEAD_DIM + HALF, mask=exists, other=0.0).to(tl.float32)
            rotated = a * cos_a + b * sin_a
            b = b * cos_b + a * sin_b
            a = rotated
        if head < NUM_HEADS:
            out = out_ptr + rows.to(tl.int64)[None, :] * (NUM_HEADS * HEAD_DIM) + columns[:, None]
            tl.store(out, a.to(out_ptr.dtype.element_ty), mask=exists)
            tl.store(out + HALF, b.to(out_ptr.dtype.element_ty), mask=exists)
        else:
            slots = tl.load(slots_ptr + rows, mask=rows < M, other=-1).to(tl.int64)
            target = pool_ptr + (slots // BLOCK_SIZE) * block_stride + layer.to(tl.int64) * layer_stride
            target += (slots % BLOCK_SIZE) * HEAD_DIM + (head - NUM_HEADS) * (BLOCK_SIZE * HEAD_DIM)
            stored = exists & (slots >= 0)[None, :]
            tl.store(target[None, :] + dims[:, None], a.to(pool_ptr.dtype.element_ty), mask=stored)
            tl.store(target[None, :] + dims[:, None] + HALF, b.to(pool_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _embed_kernel(
    token_ids_ptr, embedding_ptr, norm_ptr, residual_ptr, scaled_ptr, squares_ptr, n,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    token_id = tl.load(token_ids_ptr + row)
    x = tl.load(embedding_ptr + token_id * n + columns, mask=inside, other=0.0)
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_ptr + row * n + columns, x, mask=inside)
    value = x.to(tl.float32)
    tl.store(scaled_ptr + row * n + columns, (value * norm).to(scaled_ptr.dtype.element_ty), mask=inside)
    tl.store(squares_ptr + row, tl.sum(value * value, axis=0))


def embed(token_ids: Tensor, embedding: Tensor, norm: Tensor) -> Residual:
    """token_ids (rows,); embedding (vocab, hidden), contiguous; norm (hidden,): weight of the first norm."""
    num_rows, hidden = token_ids.shape[0], embedding.shape[1]
    value, scaled = (torch.empty(num_rows, hidden, dtype=embedding.dtype, device=embedding.device) for _ in range(2))
    squares = torch.empty(num_rows * triton.cdiv(hidden, 16), dtype=torch.float32, device=embedding.device)
    overlaps = overlaps_launches(embedding)
    _embed_kernel[(num_rows,)](
        token_ids, embedding, norm, value, scaled, squares, hidden,
        BLOCK=triton.next_power_of_2(hidden), OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps,
    )  # fmt: skip
    return Residual(value, scaled, squares, 1)


def gated(
    residual: Residual, weight: Tensor, bias: Tensor | None, eps: float, workspace: SmallMWorkspace,
    config: SmallMConfig,
) -> Tensor:  # fmt: skip
    """weight (2 inner, hidden), gate first; bias (2 inner,) or None -> (rows, inner)."""
    x = residual.scaled
    n = weight.shape[0] // 2
    out = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    num_tiles = triton.cdiv(n, config.block_n)
    grid, options = _options(x, weight, num_tiles, n % config.block_n == 0, config, 2, workspace)
    _gated_kernel[grid](
        x, weight, bias if bias is not None else x, residual.squares, out,
        workspace.partials, workspace.counters, x.shape[0], n, x.shape[1], x.stride(0), residual.num_parts, eps,
        HAS_BIAS=bias is not None, PARTS=triton.next_power_of_2(residual.num_parts), **options,
    )  # fmt: skip
    return out


def add_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Residual, next_norm: Tensor, workspace: SmallMWorkspace,
    config: SmallMConfig,
) -> None:  # fmt: skip
    """Adds x W^T + b to the residual, in place. x (rows, in), columns of stride 1; weight (hidden, in).

    next_norm (hidden,): weight of the norm that the residual goes through next.
    """
    n = weight.shape[0]
    num_tiles = triton.cdiv(n, config.block_n)
    if x.shape[0] * num_tiles > residual.squares.numel():
        raise ValueError(f"tiles of {config.block_n} columns are too narrow for the sums of squares")
    grid, options = _options(x, weight, num_tiles, n % config.block_n == 0, config, 1, workspace)
    _add_kernel[grid](
        x, weight, bias if bias is not None else x, residual.value, next_norm, residual.scaled,
        residual.squares, workspace.partials, workspace.counters, x.shape[0], n, x.shape[1], x.stride(0),
        HAS_BIAS=bias is not None, **options,
    )  # fmt: skip
    residual.num_parts = num_tiles


def rotated_qkv(
    residual: Residual, weight: Tensor, bias: Tensor | None, eps: float, table: Tensor, positions: Tensor,
    slots: Tensor, qk_norm: Tensor | None, pool: Tensor, layer: int, workspace: SmallMWorkspace, config: SmallMConfig,
) -> Tensor:  # fmt: skip
    """q (rows, num_heads, head_dim), normed and rotated; k, alike, and v are stored in the pool.

    weight (heads * head_dim, hidden), heads in the order q, k, v. table, positions, slots, qk_norm, pool and layer as
    `rope_and_write_kv` takes them. config.block_n is not used: a program takes a head.
    """
    x = residual.scaled
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    num_all_heads = weight.shape[0] // head_dim
    num_heads = num_all_heads - 2 * num_kv_heads
    if head_dim & (head_dim - 1) or not (table.is_contiguous() and pool.is_contiguous()):
        raise ValueError(f"head_dim {head_dim} must be a power of two, table and pool contiguous")
    q = torch.empty(x.shape[0], num_heads, head_dim, dtype=x.dtype, device=x.device)
    grid, options = _options(x, weight, num_all_heads, head_dim >= 32, config, 2, workspace, max(head_dim // 2, 16))
    _rotated_qkv_kernel[grid](
        x, weight, bias if bias is not None else x, residual.squares, q,
        workspace.partials, workspace.counters, x.shape[0], x.shape[1], x.stride(0), residual.num_parts, eps,
        table, positions, slots, qk_norm if qk_norm is not None else table,
        pool, layer, pool.stride(0), pool.stride(1),
        HAS_BIAS=bias is not None, HAS_NORM=qk_norm is not None, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, PARTS=triton.next_power_of_2(residual.num_parts), **options,
    )  # fmt: skip
    return q


def _options(
    x: Tensor, weight: Tensor, num_tiles: int, fills_tiles: bool, config: SmallMConfig, tiles_held: int,
    workspace: SmallMWorkspace, block_n: int = 0,
) -> tuple[tuple[int, int, int], dict[str, Any]]:  # fmt: skip
    """Grid, and the constants and launch options that the products share. Raises ValueError for what does not fit.

    The grid is (blocks of rows, tiles of W, splits): programs that share a tile run side by side and read it once.
    """
    num_rows, k = x.shape
    if num_rows > MAX_FEW_ROWS:
        raise ValueError(f"{num_rows} rows are too many")
    if not weight.is_contiguous() or weight.shape[1] != k:
        raise ValueError(f"a contiguous weight of {k} columns is needed")
    block_n = block_n or config.block_n
    block_m = min(max(16, triton.next_power_of_2(num_rows)), MAX_BLOCK_M)
    num_blocks = triton.cdiv(num_rows, block_m)
    size = num_blocks * num_tiles * config.split_k * tiles_held * block_n * block_m
    fits = size <= workspace.partials.numel() and num_blocks * num_tiles <= workspace.counters.numel()
    if config.split_k > 1 and not fits:
        raise ValueError(f"the workspace is too small for {size} partial sums of {num_tiles} tiles")
    overlaps = overlaps_launches(x)
    return (num_blocks, num_tiles, config.split_k), {
        "EVEN": fills_tiles and k % config.block_k == 0, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "BLOCK_K": config.block_k, "SPLIT_K": config.split_k, "NUM_STAGES": config.num_stages, "OVERLAPS": overlaps,
        "PREFETCHES": overlaps and weight.numel() <= MAX_PREFETCHED,
        "num_warps": config.num_warps, "launch_pdl": overlaps,
    }  # fmt: skip
