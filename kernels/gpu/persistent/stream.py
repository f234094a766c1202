"""A ring of slots of shared memory, which producer warps fill with weights, keys and values in the order of use."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from kernels.gpu.persistent.shape import CHUNK, HEAD_DIM, NUM_WEIGHTS, SOFTMAX_TILES, TILE_KEYS

PRODUCERS = gl.constexpr(4)  # warps
PARTS = gl.constexpr(8)  # of a chunk, which warps share
DIMS = gl.constexpr(HEAD_DIM)
KEYS = gl.constexpr(TILE_KEYS)
BATCH = gl.constexpr(SOFTMAX_TILES)
COLUMNS = gl.constexpr(CHUNK)
OF_WEIGHTS = gl.constexpr(
    gl.BlockedLayout([1, 1, 8], [1, 2, 16], [4, 1, 1], [2, 1, 0])
)  # (half of PARTS, rows, dims)
OF_KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
# Threads read 8 neighbours of a row: two rows side by side fill the banks. Values are read transposed.
WEIGHTS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0]))
KEYS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 2, [1, 0]))
VALUES_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
QKV, OUTPUT, GATE_UP, DOWN = (gl.constexpr(i) for i in range(4))
WEIGHTS = gl.constexpr(NUM_WEIGHTS)


@gluon.jit
def following(slot, phase, count, SLOTS: gl.constexpr):
    """The slot `count` further, and its phase."""
    slot += count
    wraps = slot >= SLOTS
    return gl.where(wraps, slot - SLOTS, slot), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def wait_for(ready, slot, phase, count, MOST: gl.constexpr, SLOTS: gl.constexpr):
    """Wait until `count` slots from `slot` on are filled."""
    for i in gl.static_range(MOST):
        mbarrier.wait(ready.index(slot), phase, pred=i < count)
        slot, phase = following(slot, phase, 1, SLOTS)


@gluon.jit
def release(empty, slot, count, SLOTS: gl.constexpr):
    """Let the last `count` slots before `slot`, which all threads have read, be filled again."""
    for i in range(count):
        at = slot - 1 - i
        mbarrier.arrive(empty.index(gl.where(at < 0, at + SLOTS, at)), count=1)


@gluon.jit
def _sent(AHEAD: gl.constexpr):
    """What was asked for is a group; wait until fewer than AHEAD are on their way, or they delay words."""
    async_copy.commit_group()
    async_copy.wait_group(AHEAD - 1)


@gluon.jit
def _put_rows(weight, first_row, K: gl.constexpr, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """8 rows of W, a chunk in each slot."""
    SLOTS: gl.constexpr = SHAPE.value.slots
    part = gl.arange(0, PARTS // 2, gl.SliceLayout(1, gl.SliceLayout(2, OF_WEIGHTS)))
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, OF_WEIGHTS)))
    column = gl.arange(0, DIMS, gl.SliceLayout(0, gl.SliceLayout(0, OF_WEIGHTS)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 0)
    of_row = first_row.to(gl.int64) * K + row[None, :] * K + part[:, None] * DIMS
    at = weight + (gl.expand_dims(of_row, 2) + column)
    at = gl.max_contiguous(gl.multiple_of(at, [16, 16, 16]), [1, 1, 8])
    for i in gl.static_range((K + COLUMNS - 1) // COLUMNS):
        mbarrier.wait(empty.index(slot), phase)
        for half in gl.static_range(2):
            first = i * COLUMNS + half * (COLUMNS // 2)
            to = smem.index(slot).slice(half * (PARTS // 2), PARTS // 2)
            inside = gl.expand_dims((part * DIMS < K - first)[:, None] & (row >= 0)[None, :], 2) & (column >= 0)
            async_copy.async_copy_global_to_shared(to, at + first, mask=inside)
            _sent(SHAPE.value.halves_ahead)
        async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
        slot, phase = following(slot, phase, 1, SLOTS)
    return slot, phase


@gluon.jit
def _put_tile(at, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """A tile of keys or values, whose rows are at (TILE_KEYS / 2, 2) pointers."""
    mbarrier.wait(empty.index(slot), phase)
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(smem.index(slot).slice(half * (KEYS // 2), KEYS // 2), at[half])
        _sent(SHAPE.value.halves_ahead)
    async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
    return following(slot, phase, 1, SHAPE.value.slots)


@gluon.jit
def tiles_of_split(num_keys, SHAPE: gl.constexpr):
    """KV head of a program, its first tile of keys, and how many it takes; none of a program without a head."""
    SPLITS: gl.constexpr = SHAPE.value.splits
    program = gl.program_id(0)
    num_tiles = (num_keys + KEYS - 1) // KEYS
    share = (num_tiles + SPLITS - 1) // SPLITS
    first = program % SPLITS * share
    count = gl.minimum(share, num_tiles - first)
    return program // SPLITS, first, gl.where(program < SHAPE.value.kv_heads * SPLITS, count, 0)


@gluon.jit
def produce(
    weights_ptr, pool_ptr, table_ptr, smem, ready, empty, num_layers, num_keys, layer_stride, block_stride,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Fill slots with what the program needs of all layers, as they become empty."""
    P: gl.constexpr = SHAPE.value.programs
    BLOCK: gl.constexpr = SHAPE.value.block_size
    HIDDEN: gl.constexpr = SHAPE.value.hidden
    INNER: gl.constexpr = SHAPE.value.intermediate
    VALUES: gl.constexpr = SHAPE.value.kv_heads * BLOCK * DIMS  # from keys to values
    keys_smem = smem._reinterpret(gl.bfloat16, [SHAPE.value.slots, KEYS, DIMS], KEYS_SHARED)
    values_smem = smem._reinterpret(gl.bfloat16, [SHAPE.value.slots, KEYS, DIMS], VALUES_SHARED)
    program = gl.program_id(0)
    kv_head, first_tile, num_tiles = tiles_of_split(num_keys, SHAPE)
    in_half = gl.arange(0, KEYS // 2, gl.SliceLayout(1, OF_KEYS))
    dims = gl.arange(0, DIMS, gl.SliceLayout(0, OF_KEYS))[None, :]
    slot = 0
    phase = 1
    for layer in range(num_layers):
        of_layer = weights_ptr + layer * WEIGHTS
        qkv = gl.load(of_layer + QKV).to(gl.pointer_type(gl.bfloat16))
        output = gl.load(of_layer + OUTPUT).to(gl.pointer_type(gl.bfloat16))
        gate_up = gl.load(of_layer + GATE_UP).to(gl.pointer_type(gl.bfloat16))
        down = gl.load(of_layer + DOWN).to(gl.pointer_type(gl.bfloat16))
        for tile in range(program, SHAPE.value.qkv // 8, P):
            slot, phase = _put_rows(qkv, tile * 8, HIDDEN, smem, ready, empty, slot, phase, SHAPE)
        layer_at = layer.to(gl.int64) * layer_stride  # type: ignore[attr-defined]
        of_head = pool_ptr + layer_at + kv_head * (BLOCK * DIMS)
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
        for tile in range(program, HIDDEN // 8, P):
            slot, phase = _put_rows(output, tile * 8, SHAPE.value.attended, smem, ready, empty, slot, phase, SHAPE)
        for tile in range(program, INNER // 8, P):
            slot, phase = _put_rows(gate_up, tile * 8, HIDDEN, smem, ready, empty, slot, phase, SHAPE)
            slot, phase = _put_rows(gate_up, INNER + tile * 8, HIDDEN, smem, ready, empty, slot, phase, SHAPE)
        for tile in range(program, HIDDEN // 8, P):
            slot, phase = _put_rows(down, tile * 8, INNER, smem, ready, empty, slot, phase, SHAPE)
