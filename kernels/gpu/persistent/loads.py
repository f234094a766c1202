"""Asynchronous copies of producer warps, half a slot at a time, with a limit on halves in flight."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from kernels.gpu.persistent.ring import DIMS, following

# (slices of K, rows, dims), 16 bytes per thread
OF_BFLOAT16 = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 2, 16], [4, 1, 1], [2, 1, 0]))
OF_E4M3 = gl.constexpr(gl.BlockedLayout([1, 1, 16], [1, 4, 8], [4, 1, 1], [2, 1, 0]))


@gluon.jit
def sent(share, AHEAD: gl.constexpr):
    """Commit the copies as a group and wait until fewer than AHEAD are in flight, since more would delay words.

    Programs get bandwidth in proportion to their bytes in flight. If some have a tile more than most, they have more
    in flight (share 1) and the others less (-1), so that all finish together.
    """
    async_copy.commit_group()
    if share > 0:
        async_copy.wait_group(AHEAD + 1)
    elif share < 0:
        async_copy.wait_group(max(AHEAD - 2, 0))
    else:
        async_copy.wait_group(AHEAD - 1)


@gluon.jit
def put_chunk(weight, first_row, i, K: gl.constexpr, share, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load chunk i of 8 rows of W (any, K). share: see `sent`."""
    HALF: gl.constexpr = smem.shape[1] // 2  # slices
    k_slice, row = slices_and_rows(smem, HALF)
    of_row = first_row.to(gl.int64) * K + row[None, :] * K + k_slice[:, None] * DIMS
    mbarrier.wait(empty.index(slot), phase)
    for half in gl.static_range(2):
        first = (2 * i + half) * (HALF * DIMS)
        inside = (k_slice * DIMS < K - first)[:, None] & (row >= 0)[None, :]
        put_half(weight + of_row + first, inside, half, share, smem, slot, SHAPE)
    async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
    return following(slot, phase, 1, SHAPE.value.slots)


@gluon.jit
def slices_and_rows(smem, HALF: gl.constexpr):
    """Return the indices of a half slot's slices of K, and of its rows."""
    LAYOUT: gl.constexpr = OF_E4M3 if smem.dtype == gl.float8e4nv else OF_BFLOAT16
    k_slice = gl.arange(0, HALF, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    return k_slice, gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))


@gluon.jit
def put_half(rows, inside, half: gl.constexpr, share, smem, slot, SHAPE: gl.constexpr):
    """Load half of a slot: DIMS numbers from each of the pointers `rows` (half of its slices, 8) on."""
    HALF: gl.constexpr = smem.shape[1] // 2
    IS_E4M3: gl.constexpr = smem.dtype == gl.float8e4nv
    LAYOUT: gl.constexpr = OF_E4M3 if IS_E4M3 else OF_BFLOAT16
    ALIGNED: gl.constexpr = 16 if IS_E4M3 else 8
    column = gl.arange(0, DIMS, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 0)
    at = gl.max_contiguous(gl.multiple_of(gl.expand_dims(rows, 2) + column, [16, 16, 16]), [1, 1, ALIGNED])
    to = smem.index(slot).slice(half * HALF, HALF)
    async_copy.async_copy_global_to_shared(to, at, mask=gl.expand_dims(inside, 2) & (column >= 0))
    sent(share, SHAPE.value.halves_ahead)
