"""Producer warps fill the ring with weights, keys and values in the order of use."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from kernels.gpu.persistent.ring import (
    BATCH,
    DIMS,
    KEYS,
    KEYS_SHARED,
    VALUES_SHARED,
    chosen_experts,
    following,
    num_chunks,
    one_of,
    order,
    prefetch,
    tiles_of_split,
    weight_slots,
)
from kernels.gpu.persistent.shape import NUM_ADDRESSES

# (slices of K, rows, dims), 16 bytes a thread
OF_BFLOAT16 = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 2, 16], [4, 1, 1], [2, 1, 0]))
OF_E4M3 = gl.constexpr(gl.BlockedLayout([1, 1, 16], [1, 4, 8], [4, 1, 1], [2, 1, 0]))
OF_KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
QKV, OUTPUT, GATE_UP, DOWN, ROUTER = (gl.constexpr(i) for i in range(5))
SCALES = gl.constexpr(5)  # the first of four
BIAS = gl.constexpr(9)
ADDRESSES = gl.constexpr(NUM_ADDRESSES)


@gluon.jit
def _sent(share, AHEAD: gl.constexpr):
    """What was asked for is a group; wait until fewer than AHEAD are on their way, or they delay words.

    Programs get bandwidth by what they have on its way. Where some have a tile more than most, these ask for more
    (share 1) and the others for less (-1), so that all finish together.
    """
    async_copy.commit_group()
    if share > 0:
        async_copy.wait_group(AHEAD + 1)
    elif share < 0:
        async_copy.wait_group(max(AHEAD - 2, 0))
    else:
        async_copy.wait_group(AHEAD - 1)


@gluon.jit
def _put_chunk(weight, first_row, i, K: gl.constexpr, share, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Chunk i of 8 rows of W (any, K). share: see `_sent`."""
    HALF: gl.constexpr = smem.shape[1] // 2  # slices
    k_slice, row = _slices_and_rows(smem, HALF)
    of_row = first_row.to(gl.int64) * K + row[None, :] * K + k_slice[:, None] * DIMS
    mbarrier.wait(empty.index(slot), phase)
    for half in gl.static_range(2):
        first = (2 * i + half) * (HALF * DIMS)
        inside = (k_slice * DIMS < K - first)[:, None] & (row >= 0)[None, :]
        _put_half(weight + of_row + first, inside, half, share, smem, slot, SHAPE)
    async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
    return following(slot, phase, 1, SHAPE.value.slots)


@gluon.jit
def _slices_and_rows(smem, HALF: gl.constexpr):
    """Numbers of a half slot's slices of K, and of its rows."""
    LAYOUT: gl.constexpr = OF_E4M3 if smem.dtype == gl.float8e4nv else OF_BFLOAT16
    k_slice = gl.arange(0, HALF, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    return k_slice, gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))


@gluon.jit
def _put_half(rows, inside, half: gl.constexpr, share, smem, slot, SHAPE: gl.constexpr):
    """Half of a slot: DIMS numbers from each of the pointers on (half of its slices, 8)."""
    HALF: gl.constexpr = smem.shape[1] // 2
    IS_E4M3: gl.constexpr = smem.dtype == gl.float8e4nv
    LAYOUT: gl.constexpr = OF_E4M3 if IS_E4M3 else OF_BFLOAT16
    ALIGNED: gl.constexpr = 16 if IS_E4M3 else 8
    column = gl.arange(0, DIMS, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 0)
    at = gl.max_contiguous(gl.multiple_of(gl.expand_dims(rows, 2) + column, [16, 16, 16]), [1, 1, ALIGNED])
    to = smem.index(slot).slice(half * HALF, HALF)
    async_copy.async_copy_global_to_shared(to, at, mask=gl.expand_dims(inside, 2) & (column >= 0))
    _sent(share, SHAPE.value.halves_ahead)


@gluon.jit
def _put_rows(weight, first_row, K: gl.constexpr, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """8 rows of W, a chunk in each slot."""
    for i in gl.static_range(num_chunks(K, smem.shape[1])):
        slot, phase = _put_chunk(weight, first_row, i, K, 0, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def _put_weight(weight, N: gl.constexpr, K: gl.constexpr, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """All of the program's tiles of W (N, K)."""
    ORDER: gl.constexpr = order(SHAPE, N, K, 1)
    P: gl.constexpr = SHAPE.value.programs
    WITH_MORE: gl.constexpr = N // 8 % P
    share = gl.program_id(0) * 0
    if WITH_MORE > 0 and WITH_MORE < P // 2:
        share = gl.where(gl.program_id(0) < WITH_MORE, 1, -1)
    if ORDER == "chunks":
        for i in range(num_chunks(K, smem.shape[1])):
            for tile in range(gl.program_id(0), N // 8, P):
                slot, phase = _put_chunk(weight, tile * 8, i, K, share, smem, ready, empty, slot, phase, SHAPE)
    elif ORDER == "pairs":
        for first in range(gl.program_id(0), N // 8, 2 * P):
            for i in range(num_chunks(K, smem.shape[1])):
                for tile in range(first, gl.minimum(first + 2 * P, N // 8), P):
                    slot, phase = _put_chunk(weight, tile * 8, i, K, share, smem, ready, empty, slot, phase, SHAPE)
    else:
        for tile in range(gl.program_id(0), N // 8, SHAPE.value.programs):
            slot, phase = _put_rows(weight, tile * 8, K, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def _put_two(weight, of_gate, of_up, N: gl.constexpr, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """8 rows of gate and 8 of up, of N in all."""
    H: gl.constexpr = SHAPE.value.hidden
    if order(SHAPE, N, H, 2) == "pairs":
        for i in range(num_chunks(H, smem.shape[1])):
            slot, phase = _put_chunk(weight, of_gate, i, H, 0, smem, ready, empty, slot, phase, SHAPE)
            slot, phase = _put_chunk(weight, of_up, i, H, 0, smem, ready, empty, slot, phase, SHAPE)
    else:
        slot, phase = _put_rows(weight, of_gate, H, smem, ready, empty, slot, phase, SHAPE)
        slot, phase = _put_rows(weight, of_up, H, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def _put_pairs(weight, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """The program's tiles of W_gate_up of an MLP: those of gate and up in turn."""
    INNER: gl.constexpr = SHAPE.value.intermediate
    for tile in range(gl.program_id(0), INNER // 8, SHAPE.value.programs):
        slot, phase = _put_two(weight, tile * 8, INNER + tile * 8, INNER, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def _ask_for_pages(gate_up, chosen, SHAPE: gl.constexpr):
    """Touch each of the program's tiles of the experts' gate and up: their pages' addresses are translated together.

    Translations of other experts have replaced those of this layer's; one after the other they delay the stream.
    """
    H: gl.constexpr = SHAPE.value.hidden
    INNER: gl.constexpr = SHAPE.value.intermediate
    COUNT: gl.constexpr = SHAPE.value.chosen
    i = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))  # gate and up of 16 tiles at most
    tile = gl.program_id(0) + i // 2 * SHAPE.value.programs
    tile = gl.where(tile < COUNT * INNER // 8, tile, gl.program_id(0))
    expert = one_of(chosen, tile // (INNER // 8), COUNT).to(gl.int64)
    prefetch(gate_up + (expert * (2 * INNER) + i % 2 * INNER + tile % (INNER // 8) * 8) * H)


@gluon.jit
def _put_experts(gate_up, down, chosen, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """The program's tiles of gate and up of the token's experts, then of W_down, whose columns are all experts'.

    gate_up: (experts, 2 intermediate, hidden). down: (experts, hidden, intermediate). chosen: a tuple of experts.
    """
    P: gl.constexpr = SHAPE.value.programs
    H: gl.constexpr = SHAPE.value.hidden
    INNER: gl.constexpr = SHAPE.value.intermediate
    COUNT: gl.constexpr = SHAPE.value.chosen
    _ask_for_pages(gate_up, chosen, SHAPE)
    for tile in range(gl.program_id(0), COUNT * INNER // 8, P):
        expert = one_of(chosen, tile // (INNER // 8), COUNT)
        weight = gate_up + expert.to(gl.int64) * (2 * INNER * H)
        row = tile % (INNER // 8) * 8
        slot, phase = _put_two(weight, row, INNER + row, COUNT * INNER, smem, ready, empty, slot, phase, SHAPE)
    CHUNKS: gl.constexpr = num_chunks(COUNT * INNER, smem.shape[1])
    if order(SHAPE, H, COUNT * INNER, 1) == "chunks":
        for i in range(CHUNKS):
            for tile in range(gl.program_id(0), H // 8, P):
                slot, phase = _put_chunk_of_experts(down, chosen, tile, i, smem, ready, empty, slot, phase, SHAPE)
    else:
        for tile in range(gl.program_id(0), H // 8, P):
            for i in gl.static_range(CHUNKS):
                slot, phase = _put_chunk_of_experts(down, chosen, tile, i, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def _put_chunk_of_experts(down, chosen, tile, i, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Chunk i of 8 rows of the chosen experts' W_down next to each other."""
    H: gl.constexpr = SHAPE.value.hidden
    INNER: gl.constexpr = SHAPE.value.intermediate
    COUNT: gl.constexpr = SHAPE.value.chosen
    OF_EXPERT: gl.constexpr = INNER // DIMS  # slices
    HALF: gl.constexpr = smem.shape[1] // 2
    k_slice, row = _slices_and_rows(smem, HALF)
    mbarrier.wait(empty.index(slot), phase)
    for half in gl.static_range(2):
        number = (2 * i + half) * HALF + k_slice
        expert = one_of(chosen, number // OF_EXPERT, COUNT)
        of_slice = expert.to(gl.int64) * (H * INNER) + number % OF_EXPERT * DIMS
        rows = down + (of_slice[:, None] + ((tile * 8 + row) * INNER)[None, :])
        inside = (number < COUNT * OF_EXPERT)[:, None] & (row >= 0)[None, :]
        _put_half(rows, inside, half, 0, smem, slot, SHAPE)
    async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
    return following(slot, phase, 1, SHAPE.value.slots)


@gluon.jit
def _put_tile(at, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """A tile of keys or values, whose rows are at (TILE_KEYS / 2, 2) pointers."""
    mbarrier.wait(empty.index(slot), phase)
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(smem.index(slot).slice(half * (KEYS // 2), KEYS // 2), at[half])
        _sent(0, SHAPE.value.halves_ahead)
    async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
    return following(slot, phase, 1, SHAPE.value.slots)


@gluon.jit
def produce(
    weights_ptr, pool_ptr, table_ptr, smem, ready, empty, experts_smem, is_chosen, num_layers, num_keys, layer_stride,
    block_stride, SHAPE: gl.constexpr,
):  # fmt: skip
    """Fill slots with what the program needs of all layers, as they become empty.

    is_chosen: completes a phase a layer, when `experts_smem` has the token's experts.
    """
    H: gl.constexpr = SHAPE.value.hidden
    ring = weight_slots(smem, SHAPE)
    POINTER: gl.constexpr = gl.pointer_type(ring.dtype)
    slot = 0
    phase = 1
    for layer in range(num_layers):
        of_layer = weights_ptr + layer * ADDRESSES
        qkv = gl.load(of_layer + QKV).to(POINTER)
        output = gl.load(of_layer + OUTPUT).to(POINTER)
        gate_up = gl.load(of_layer + GATE_UP).to(POINTER)
        down = gl.load(of_layer + DOWN).to(POINTER)
        slot, phase = _put_weight(qkv, SHAPE.value.qkv, H, ring, ready, empty, slot, phase, SHAPE)
        of_pool = pool_ptr + layer.to(gl.int64) * layer_stride  # type: ignore[attr-defined]
        slot, phase = _put_kv(of_pool, table_ptr, num_keys, smem, ready, empty, slot, phase, block_stride, SHAPE)
        slot, phase = _put_weight(output, H, SHAPE.value.attended, ring, ready, empty, slot, phase, SHAPE)
        if SHAPE.value.experts:
            router = gl.load(of_layer + ROUTER).to(gl.pointer_type(gl.bfloat16))
            slot, phase = _put_weight(router, SHAPE.value.experts, H, smem, ready, empty, slot, phase, SHAPE)
            mbarrier.wait(is_chosen.index(0), layer & 1)
            chosen = chosen_experts(experts_smem, SHAPE.value.chosen)
            slot, phase = _put_experts(gate_up, down, chosen, ring, ready, empty, slot, phase, SHAPE)
        else:
            slot, phase = _put_pairs(gate_up, ring, ready, empty, slot, phase, SHAPE)
            slot, phase = _put_weight(down, H, SHAPE.value.inner, ring, ready, empty, slot, phase, SHAPE)


@gluon.jit
def _put_kv(of_pool, table_ptr, num_keys, smem, ready, empty, slot, phase, block_stride, SHAPE: gl.constexpr):
    """Keys and values of the program's split, BATCH tiles of keys before those of values. of_pool: of the layer."""
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
