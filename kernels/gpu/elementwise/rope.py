"""The steps between the q/k/v GEMM and attention in one pass: QK-norm, rotary embedding, KV write.

For every head x of q and k:  x = rms_norm(x) * weight (if the model has QK-norm), then
x * cos + (second half, first half) * sin with the position's row of the table; sin includes the rotation's sign.
q and k are written in place; k and v are written to their slot of the paged pool. Computed in float32, rounded once;
for an 8-bit pool they are clamped to +-448.

In the pool's layout (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim) the k heads and then the v heads
of a layer follow each other, as they do in qkv, so one index covers both.

Reference: `rope_reference` of `tests/kernels/elementwise/test_rope.py`, from `kernels/elementwise.py` and `write_kv`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import (
    FastLaunch,
    let_successor_start,
    overlaps_launches,
    wait_first,
    wait_for_predecessor,
)
from kernels.gpu.tuning import ROPE, RopeConfig, found

STREAMED_BYTES = 32 << 20  # for larger q, k and v: 84% of copy bandwidth at 8,192 tokens, 83% without


@triton.jit
def as_stored(x, dtype: tl.constexpr):
    """Convert float32 to a pool's `dtype`; 8-bit numbers are clamped to +-448. NaN stays NaN."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@FastLaunch
@triton.jit(do_not_specialize=["layer", "num_tokens"])
def _rope_kernel(
    qkv_ptr, table_ptr, positions_ptr, slots_ptr, norm_ptr, pool_ptr,
    num_tokens, layer, token_stride, block_stride, layer_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr, HAS_NORM: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, STREAMS: tl.constexpr, OVERLAPS: tl.constexpr, SPREADS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    # Data that will not be in the L2 cache when it is read again should not evict other data.
    EVICT: tl.constexpr = "evict_first" if STREAMS else ""
    STREAM: tl.constexpr = ".cs" if STREAMS else ""
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)[None, None, :]
    is_token = tokens < num_tokens
    positions = tl.load(positions_ptr + tokens, mask=is_token, other=0).to(tl.int64)
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=-1).to(tl.int64)
    exists = is_token[:, None, None] & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[None, :, None]
    rotates = (heads < NUM_HEADS + NUM_KV_HEADS)[None, :, None]
    # Pointers of the full shape, here and for the norm: each thread loads its own values, without shuffles.
    row = table_ptr + (positions * (2 * HEAD_DIM))[:, None, None] + (heads * 0)[None, :, None] + dims
    cos = tl.load(row).to(tl.float32)
    sin = tl.load(row + HEAD_DIM + HALF).to(tl.float32)

    if SPREADS:
        wait_first(OVERLAPS)
        let_successor_start(OVERLAPS)
    else:
        wait_for_predecessor(OVERLAPS)
    source = qkv_ptr + (tokens * token_stride)[:, None, None] + (heads * HEAD_DIM)[None, :, None] + dims
    first = tl.load(source, mask=exists, other=0.0, eviction_policy=EVICT).to(tl.float32)
    second = tl.load(source + HALF, mask=exists, other=0.0, eviction_policy=EVICT).to(tl.float32)
    for split in tl.static_range(1, NUM_SPLITS):
        other = source + split * (num_tokens * token_stride)
        first += tl.load(other, mask=exists, other=0.0).to(tl.float32)
        second += tl.load(other + HALF, mask=exists, other=0.0).to(tl.float32)
    x, y = first, second
    if HAS_NORM:
        square = tl.sum(x * x, axis=2) + tl.sum(y * y, axis=2)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, :, None]
        weight = norm_ptr + (tokens * 0)[:, None, None] + (heads * HEAD_DIM)[None, :, None] + dims
        x = x * scale * tl.load(weight, mask=rotates, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight + HALF, mask=rotates, other=0.0).to(tl.float32)
    out_first = tl.where(rotates, x * cos - y * sin, first)
    out_second = tl.where(rotates, y * cos + x * sin, second)

    stays = exists & rotates
    tl.store(source, out_first.to(qkv_ptr.dtype.element_ty), mask=stays, cache_modifier=STREAM)
    tl.store(source + HALF, out_second.to(qkv_ptr.dtype.element_ty), mask=stays, cache_modifier=STREAM)
    offsets = (slots // BLOCK_SIZE) * block_stride + (slots % BLOCK_SIZE) * HEAD_DIM
    offsets += layer.to(tl.int64) * layer_stride
    target = pool_ptr + offsets[:, None, None] + ((heads - NUM_HEADS) * (BLOCK_SIZE * HEAD_DIM))[None, :, None] + dims
    is_kv = exists & (heads >= NUM_HEADS)[None, :, None] & (slots >= 0)[:, None, None]
    tl.store(target, as_stored(out_first, pool_ptr.dtype.element_ty), mask=is_kv, cache_modifier=STREAM)
    tl.store(target + HALF, as_stored(out_second, pool_ptr.dtype.element_ty), mask=is_kv, cache_modifier=STREAM)


def rope_and_write_kv(
    qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, qk_norm: Tensor | None, eps: float,
    pool: Tensor, layer: int, config: RopeConfig | None = None, spreads_next: bool = True,
) -> None:  # fmt: skip
    """Rotate q and k in place; store rotated k, and v, in the pool.

    qkv: (num_tokens, num_heads + 2 num_kv_heads, head_dim), contiguous; head_dim a power of two. Or split-K
        partials (num_splits, ...), which are added up; the first one then holds the result.
    table: (num_positions, 2, head_dim), cosines and signed sines. Both halves of a row are equal except for the
        sines' sign, so only one half of each is read. positions: int (num_tokens,).
    slots: int (num_tokens,): block id * block_size + offset in the block; negative: not stored.
    qk_norm: (num_heads + num_kv_heads, head_dim) or None.
    pool: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), contiguous; float8_e4m3fn is supported.
    spreads_next: the programs of the next kernel, attention, start when all kernels before this one have ended, so
        that they spread evenly. If they start earlier, their launch is hidden, but they stay where they first fit
        (docs/decisions/kernel-launches-and-cuda-graphs.md).
    positions, slots and table are inputs of the step, so they are read before the previous kernel has ended.
    """
    num_tokens, num_all_heads, head_dim = qkv.shape[-3:]
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    if head_dim & (head_dim - 1) or pool.shape[5] != head_dim:
        raise ValueError(f"head_dim {head_dim} must be a power of two and the pool's, {pool.shape[5]}")
    if not (qkv.is_contiguous() and table.is_contiguous() and pool.is_contiguous()):
        raise ValueError("qkv, table and pool must be contiguous")
    if num_tokens == 0:
        return
    config = config or found(ROPE.find(tokens=num_tokens))
    heads = min(config.heads, triton.next_power_of_2(num_all_heads))
    _rope_kernel[(triton.cdiv(num_tokens, config.tokens), triton.cdiv(num_all_heads, heads))](
        qkv, table, positions, slots, qk_norm if qk_norm is not None else table, pool,
        num_tokens, layer, qkv.stride(-3), pool.stride(0), pool.stride(1), eps,
        NUM_HEADS=num_all_heads - 2 * num_kv_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, NUM_SPLITS=qkv.shape[0] if qkv.dim() == 4 else 1, HAS_NORM=qk_norm is not None,
        TOKENS=config.tokens, HEADS=heads, STREAMS=qkv.nbytes > STREAMED_BYTES,
        OVERLAPS=overlaps_launches(qkv), SPREADS=spreads_next, num_warps=config.num_warps,
        launch_pdl=overlaps_launches(qkv),
    )  # fmt: skip
