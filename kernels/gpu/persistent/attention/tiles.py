"""Loads of producer warps for attention: a program's keys and values, or its latents, W_UK and W_UV."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from kernels.gpu.persistent.loads import put_half, sent, slices_and_rows
from kernels.gpu.persistent.ring import (
    BATCH,
    DIMS,
    KEYS,
    KEYS_SHARED,
    VALUES_SHARED,
    following,
    tiles_of_split,
)
from kernels.gpu.persistent.shape import CHUNK, LATENT_RANK, LATENT_ROWS, ROPE_DIM

OF_KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
OF_ROPE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
RANK, ROPE = gl.constexpr(LATENT_RANK), gl.constexpr(ROPE_DIM)
LATENT_SLOTS = gl.constexpr(LATENT_RANK // DIMS.value + 1)  # per tile of latents
HEAD_ROWS = gl.constexpr(LATENT_ROWS)  # rows of W_UK^T in a slot
VALUE_ROWS = gl.constexpr(8 * CHUNK // LATENT_RANK)  # rows of W_UV in a slot


@gluon.jit
def _put_tile(at, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load a tile of keys or values. at: pointers to its halves, (TILE_KEYS / 2, DIMS or ROPE) each."""
    mbarrier.wait(empty.index(slot), phase)
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(smem.index(slot).slice(half * (KEYS // 2), KEYS // 2), at[half])
        sent(0, SHAPE.value.halves_ahead)
    async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
    return following(slot, phase, 1, SHAPE.value.slots)


@gluon.jit
def put_kv(of_pool, table_ptr, num_keys, smem, ready, empty, slot, phase, block_stride, SHAPE: gl.constexpr):
    """Load the split's keys and values, BATCH tiles of keys and then those of values. of_pool: of the layer."""
    BLOCK: gl.constexpr = SHAPE.value.block_size
    VALUES: gl.constexpr = SHAPE.value.kv_heads * BLOCK * DIMS  # from keys to values
    keys_smem = smem._reinterpret(gl.bfloat16, [SHAPE.value.slots, KEYS, DIMS], KEYS_SHARED)
    values_smem = smem._reinterpret(gl.bfloat16, [SHAPE.value.slots, KEYS, DIMS], VALUES_SHARED)
    kv_head, first_tile, num_tiles = tiles_of_split(num_keys, SHAPE)
    in_half = gl.arange(0, KEYS // 2, gl.SliceLayout(1, OF_KEYS))
    dims = gl.arange(0, DIMS, gl.SliceLayout(0, OF_KEYS))[None, :]
    of_head = of_pool + kv_head * (BLOCK * DIMS)
    for begin in range(first_tile, first_tile + num_tiles, BATCH):
        end = gl.minimum(begin + BATCH, first_tile + num_tiles)
        for is_value in gl.static_range(2):
            for tile in range(begin, end):
                halves = ()
                for half in gl.static_range(2):
                    keys = tile * KEYS + half * (KEYS // 2) + in_half
                    block = gl.load(table_ptr + keys // BLOCK, mask=keys < num_keys, other=0).to(gl.int64)
                    row = block * block_stride + keys % BLOCK * DIMS
                    at = of_head + row[:, None] + dims + is_value * VALUES
                    halves = halves + (at,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
                to = values_smem if is_value else keys_smem
                slot, phase = _put_tile(halves, to, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def put_absorbing(weight, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load the program's rows of W_UK^T (heads, RANK, DIMS), if it has any."""
    if gl.program_id(0) < SHAPE.value.heads * RANK // HEAD_ROWS:
        first = weight + gl.program_id(0) * (HEAD_ROWS * DIMS)
        slot, phase = _put_head_rows(first, DIMS, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def put_expanding(weight, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load the program's rows of its head's W_UV (DIMS, RANK), if it has any. W_UK's rows lie between heads."""
    OF_HEAD: gl.constexpr = DIMS // VALUE_ROWS
    program = gl.program_id(0)
    if program < SHAPE.value.heads * OF_HEAD:
        first = weight + (program // OF_HEAD * (2 * DIMS) + program % OF_HEAD * VALUE_ROWS) * RANK
        slot, phase = _put_head_rows(first, RANK, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def _put_head_rows(first, LENGTH: gl.constexpr, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load a slot of rows of LENGTH from `first` on, 8 rows in LENGTH / DIMS slices."""
    HALF: gl.constexpr = smem.shape[1] // 2
    OF_ROW: gl.constexpr = LENGTH // DIMS
    k_slice, row = slices_and_rows(smem, HALF)
    mbarrier.wait(empty.index(slot), phase)
    for half in gl.static_range(2):
        number = half * HALF + k_slice
        of_slice = number // OF_ROW * (8 * LENGTH) + number % OF_ROW * DIMS
        inside = (number >= 0)[:, None] & (row >= 0)[None, :]
        put_half(first + of_slice[:, None] + row[None, :] * LENGTH, inside, half, 0, smem, slot, SHAPE)
    async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
    return following(slot, phase, 1, SHAPE.value.slots)


@gluon.jit
def rope_slots(smem, SHAPE: gl.constexpr):
    """Return the ring for rotated parts of latents (slots, twice KEYS, ROPE); a tile fills half of a slot."""
    return smem._reinterpret(gl.bfloat16, [SHAPE.value.slots, 2 * KEYS, ROPE], VALUES_SHARED)


@gluon.jit
def _latent_rows(of_pool, table_ptr, tile, half, num_keys, block_stride, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):
    """Return pointers to the latents of half a tile (KEYS / 2, 1)."""
    BLOCK: gl.constexpr = SHAPE.value.block_size
    keys = tile * KEYS + half * (KEYS // 2) + gl.arange(0, KEYS // 2, gl.SliceLayout(1, LAYOUT))
    block = gl.load(table_ptr + keys // BLOCK, mask=keys < num_keys, other=0).to(gl.int64)
    return of_pool + (block * block_stride + keys % BLOCK * (RANK + ROPE))[:, None]


@gluon.jit
def put_latents(of_pool, table_ptr, num_keys, smem, ready, empty, slot, phase, block_stride, SHAPE: gl.constexpr):
    """Load the split's latents: DIMS numbers of a tile per slot, and then the rotated part."""
    latents = smem._reinterpret(gl.bfloat16, [SHAPE.value.slots, KEYS, DIMS], VALUES_SHARED)
    _, first_tile, num_tiles = tiles_of_split(num_keys, SHAPE)
    dims = gl.arange(0, DIMS, gl.SliceLayout(0, OF_KEYS))[None, :]
    rope_dims = gl.arange(0, ROPE, gl.SliceLayout(0, OF_ROPE))[None, :]
    for tile in range(first_tile, first_tile + num_tiles):
        one = _latent_rows(of_pool, table_ptr, tile, 0, num_keys, block_stride, OF_KEYS, SHAPE) + dims
        other = _latent_rows(of_pool, table_ptr, tile, 1, num_keys, block_stride, OF_KEYS, SHAPE) + dims
        for i in gl.static_range(RANK // DIMS):
            at = one + i * DIMS, other + i * DIMS
            slot, phase = _put_tile(at, latents, ready, empty, slot, phase, SHAPE)
        one = _latent_rows(of_pool, table_ptr, tile, 0, num_keys, block_stride, OF_ROPE, SHAPE) + rope_dims
        other = _latent_rows(of_pool, table_ptr, tile, 1, num_keys, block_stride, OF_ROPE, SHAPE) + rope_dims
        at = one + RANK, other + RANK
        slot, phase = _put_tile(at, rope_slots(smem, SHAPE), ready, empty, slot, phase, SHAPE)
    return slot, phase
