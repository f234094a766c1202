"""A ring of slots of shared memory that producer warps fill and consumer warps read, and the layouts of slots."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gpu.persistent.shape import CHUNK, HEAD_DIM, SOFTMAX_TILES, TILE_KEYS, Shape

try:
    barrier = gl.barrier
except AttributeError:  # Triton 3.6
    barrier = gl.thread_barrier

PRODUCERS = gl.constexpr(4)  # warps
SLICES = gl.constexpr(8)  # per chunk of K, one for each warp
DIMS = gl.constexpr(HEAD_DIM)
KEYS = gl.constexpr(TILE_KEYS)
BATCH = gl.constexpr(SOFTMAX_TILES)
COLUMNS = gl.constexpr(CHUNK)
# Threads read 8 neighbouring numbers of a row: two adjacent rows, or four of e4m3, fill the banks. Values are read
# transposed.
WEIGHTS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0]))
E4M3_SHARED = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 4, [2, 1, 0]))
KEYS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 2, [1, 0]))
VALUES_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@triton.constexpr_function
def shape_of(text: str) -> Shape:
    """Parse `Shape.text`."""
    return Shape(*map(int, text.split(",")))  # type: ignore[arg-type]  # 0 and 1 for bools


@triton.constexpr_function
def order(shape: Shape, n: int, k: int, times: int) -> str:
    return shape.order(n, k, times)


@gluon.jit
def weight_slots(smem, SHAPE: gl.constexpr):
    """Return the ring as slots of weights: (slots, slices of K, 8, DIMS)."""
    if SHAPE.value.is_e4m3:
        smem = smem._reinterpret(gl.float8e4nv, [SHAPE.value.slots, 2 * SLICES, 8, DIMS], E4M3_SHARED)
    return smem


@triton.constexpr_function
def num_chunks(k: int, slices: int) -> int:
    """Return the number of slots for k columns, with `slices` slices per slot."""
    return -(-k // (slices * HEAD_DIM))


@gluon.jit
def prefetch(pointers):
    """Prefetch the line at each pointer into the L2 cache."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def one_of(numbers, i, COUNT: gl.constexpr):
    """Return numbers[i] of a tuple of scalars, for a scalar or tensor i."""
    found = i * 0 + numbers[0]
    for k in gl.static_range(1, COUNT):
        found = gl.where(i == k, numbers[k], found)
    return found


@gluon.jit
def chosen_experts(experts_smem, COUNT: gl.constexpr):
    """Return the token's experts as a tuple."""
    layout: gl.constexpr = gl.BlockedLayout([COUNT], [32], [gl.num_warps()], [0])
    experts = experts_smem.load(layout)
    places = gl.arange(0, COUNT, layout)
    found = ()
    for i in gl.static_range(COUNT):
        one = gl.sum(gl.where(places == i, experts, 0), axis=0)
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    return found


@gluon.jit
def following(slot, phase, count, SLOTS: gl.constexpr):
    """Return the slot `count` after `slot`, and its phase."""
    slot += count
    wraps = slot >= SLOTS
    return gl.where(wraps, slot - SLOTS, slot), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def wait_for(ready, slot, phase, count, SLOTS: gl.constexpr):
    """Wait until `count` slots from `slot` on are filled; they are filled in order, so it waits for the last one."""
    last, phase = following(slot, phase, count - 1, SLOTS)
    mbarrier.wait(ready.index(gl.maximum(last, 0)), phase, pred=count > 0)


@gluon.jit
def release(empty, slot, count, SLOTS: gl.constexpr):
    """Release the last `count` slots before `slot` to the producers; all threads must have read them."""
    for i in range(count):
        at = slot - 1 - i
        mbarrier.arrive(empty.index(gl.where(at < 0, at + SLOTS, at)), count=1)


@gluon.jit
def tiles_of_split(num_keys, SHAPE: gl.constexpr):
    """Return a program's KV head, its first tile of keys, and its number of tiles; 0 for a program without a head."""
    SPLITS: gl.constexpr = SHAPE.value.splits
    program = gl.program_id(0)
    num_tiles = (num_keys + KEYS - 1) // KEYS
    share = (num_tiles + SPLITS - 1) // SPLITS
    first = program % SPLITS * share
    count = gl.minimum(share, num_tiles - first)
    return program // SPLITS, first, gl.where(program < SHAPE.value.kv_heads * SPLITS, count, 0)
