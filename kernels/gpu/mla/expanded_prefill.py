"""Prefill attention over expanded latents (MLA) on a GPU: ordinary causal attention over contiguous keys and values.

    out_h = softmax(scale [q_h | r_h] [K_h | R]^T) V_h      [K_h | V_h] = c W_kv_b,h: one GEMM's rows, one per key

K and V are read where the GEMM wrote them, and the rotated keys R, the same for all heads, where the latents were
gathered, so nothing is copied between expansion and attention. A program computes TILE_M queries of a head.

Reference: `attend_causally` of `kernels/paged_attention.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.decode_tiles import LOG2_E
from kernels.gpu.mla.latent_tuning import EXPANDED_PREFILL, EXPANDED_PREFILL_FOUR_BYTES
from kernels.gpu.tuning import PrefillConfig

TILE_M = 128  # queries per program


@triton.jit
def _attend_keys(
    q, q_rotated, mixed, total, highest, kv_ptr, rotated_ptr, positions, first_key, start, stop, end_key, kv_stride,
    latent_stride, scale,
    IS_LAST: tl.constexpr, PLAIN: tl.constexpr, ROTATED: tl.constexpr, VALUE: tl.constexpr, TILE_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Add keys [start, stop) of a row to a running softmax. IS_LAST: some are hidden, or beyond the row's end."""
    plain, rotated, values = tl.arange(0, PLAIN), tl.arange(0, ROTATED), PLAIN + tl.arange(0, VALUE)
    for first in tl.range(start, stop, TILE_N, num_stages=NUM_STAGES):
        seen = first + tl.arange(0, TILE_N)
        places = (first_key + seen).to(tl.int64)[:, None]
        if IS_LAST:
            # After the row's last key there may be another row's, or unwritten memory: NaN, and 0 * NaN is NaN.
            is_there = (seen < end_key)[:, None]
            k = tl.load(kv_ptr + places * kv_stride + plain[None, :], mask=is_there, other=0.0)
            r = tl.load(rotated_ptr + places * latent_stride + rotated[None, :], mask=is_there, other=0.0)
            v = tl.load(kv_ptr + places * kv_stride + values[None, :], mask=is_there, other=0.0)
        else:
            k = tl.load(kv_ptr + places * kv_stride + plain[None, :])
            r = tl.load(rotated_ptr + places * latent_stride + rotated[None, :])
            v = tl.load(kv_ptr + places * kv_stride + values[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(r), scores, input_precision="ieee") * scale
        if IS_LAST:
            scores = tl.where(seen[None, :] <= positions[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        highest = new_highest
    return mixed, total, highest


@triton.jit
def _expanded_prefill_kernel(
    q_ptr, kv_ptr, rotated_ptr, starts_ptr, tiles_ptr, out_ptr, q_stride, kv_stride, latent_stride, scale,
    NUM_HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTATED: tl.constexpr, VALUE: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    first_key = tl.load(starts_ptr + tl.load(tile_ptr))
    first_token = tl.load(tile_ptr + 1)
    first_position = tl.load(tile_ptr + 2)
    count = tl.load(tile_ptr + 3)

    members = tl.arange(0, TILE_M)
    exists = (members < count)[:, None]
    tokens = (first_token + members).to(tl.int64)[:, None]
    q_at = q_ptr + tokens * q_stride + head * (PLAIN + ROTATED)
    q = tl.load(q_at + tl.arange(0, PLAIN)[None, :], mask=exists, other=0.0)
    q_rotated = tl.load(q_at + PLAIN + tl.arange(0, ROTATED)[None, :], mask=exists, other=0.0)
    positions = first_position + tl.minimum(members, count - 1)
    kv_ptr += head * (PLAIN + VALUE)

    highest = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    mixed = tl.zeros((TILE_M, VALUE), tl.float32)
    end_key = first_position + count
    seen_by_all = (first_position + 1) // TILE_N * TILE_N
    mixed, total, highest = _attend_keys(
        q, q_rotated, mixed, total, highest, kv_ptr, rotated_ptr, positions, first_key, 0, seen_by_all, end_key,
        kv_stride, latent_stride, scale, False, PLAIN, ROTATED, VALUE, TILE_N, NUM_STAGES,
    )  # fmt: skip
    mixed, total, highest = _attend_keys(
        q, q_rotated, mixed, total, highest, kv_ptr, rotated_ptr, positions, first_key, seen_by_all, end_key, end_key,
        kv_stride, latent_stride, scale, True, PLAIN, ROTATED, VALUE, TILE_N, NUM_STAGES,
    )  # fmt: skip
    mixed = mixed / tl.maximum(total, 1.0)[:, None]  # the highest score has weight 1
    target = out_ptr + (tokens * NUM_HEADS + head) * VALUE + tl.arange(0, VALUE)[None, :]
    tl.store(target, mixed.to(out_ptr.dtype.element_ty), mask=exists)


def expanded_prefill(
    q: Tensor, kv: Tensor, rotated: Tensor, scale: float, key_starts: Tensor, tiles: Tensor, out: Tensor,
    config: PrefillConfig | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention for the tokens in `tiles`, of whole rows or of chunks after other keys.

    q: (num_tokens, num_heads, plain + rotated), heads contiguous, tokens of any stride.
    kv: (num_keys, num_heads, plain + value), heads contiguous: every row's keys and values, row after row.
    rotated: (num_keys, rotated), keys of any stride. All three widths are powers of two, 16 or more.
    key_starts: int32, each row's first key. tiles: int32 (num_tiles, 4), from `prefill_tiles` with a group of one and
        TILE_M.
    out: (num_tokens, num_heads, value), contiguous; tokens in no tile are not written. Returns it.
    """
    num_heads, width = q.shape[1:]
    plain, value = width - rotated.shape[1], out.shape[2]
    if kv.shape[2] != plain + value or not out.is_contiguous() or q.stride(1) != width:
        raise ValueError(f"queries of {width}, {rotated.shape[1]} rotated, K and V of {kv.shape[2]}, out of {value}")
    if tiles.shape[0] == 0:
        return out
    config = config or (EXPANDED_PREFILL if q.itemsize <= 2 else EXPANDED_PREFILL_FOUR_BYTES)
    _expanded_prefill_kernel[(num_heads, tiles.shape[0])](
        q, kv, rotated, key_starts, tiles, out, q.stride(0), kv.stride(0), rotated.stride(0), LOG2_E * scale,
        NUM_HEADS=num_heads, PLAIN=plain, ROTATED=rotated.shape[1], VALUE=value, TILE_M=TILE_M, TILE_N=config.tile_n,
        NUM_STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    return out
