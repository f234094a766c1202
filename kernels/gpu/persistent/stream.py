"""Producer warps fill the ring with weights, keys and values in the order of use."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from kernels.gpu.persistent.attention.tiles import put_absorbing, put_expanding, put_kv, put_latents
from kernels.gpu.persistent.loads import put_chunk, put_half, slices_and_rows
from kernels.gpu.persistent.ring import (
    DIMS,
    chosen_experts,
    following,
    num_chunks,
    one_of,
    order,
    prefetch,
    weight_slots,
)
from kernels.gpu.persistent.shape import NUM_ADDRESSES

QKV, OUTPUT, GATE_UP, DOWN, ROUTER = (gl.constexpr(i) for i in range(5))
SCALES = gl.constexpr(5)  # the first of four
BIAS = gl.constexpr(9)
LATENT = gl.constexpr(10)  # W_UK^T, then W_UV
ADDRESSES = gl.constexpr(NUM_ADDRESSES)


@gluon.jit
def _put_rows(weight, first_row, K: gl.constexpr, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load 8 rows of W into slots, a chunk per slot."""
    for i in gl.static_range(num_chunks(K, smem.shape[1])):
        slot, phase = put_chunk(weight, first_row, i, K, 0, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def _put_weight(weight, N: gl.constexpr, K: gl.constexpr, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load all of the program's tiles of W (N, K)."""
    ORDER: gl.constexpr = order(SHAPE, N, K, 1)
    P: gl.constexpr = SHAPE.value.programs
    WITH_MORE: gl.constexpr = N // 8 % P
    share = gl.program_id(0) * 0
    if WITH_MORE > 0 and WITH_MORE < P // 2:
        share = gl.where(gl.program_id(0) < WITH_MORE, 1, -1)
    if ORDER == "chunks":
        for i in range(num_chunks(K, smem.shape[1])):
            for tile in range(gl.program_id(0), N // 8, P):
                slot, phase = put_chunk(weight, tile * 8, i, K, share, smem, ready, empty, slot, phase, SHAPE)
    elif ORDER == "pairs":
        for first in range(gl.program_id(0), N // 8, 2 * P):
            for i in range(num_chunks(K, smem.shape[1])):
                for tile in range(first, gl.minimum(first + 2 * P, N // 8), P):
                    slot, phase = put_chunk(weight, tile * 8, i, K, share, smem, ready, empty, slot, phase, SHAPE)
    else:
        for tile in range(gl.program_id(0), N // 8, SHAPE.value.programs):
            slot, phase = _put_rows(weight, tile * 8, K, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def _put_two(weight, of_gate, of_up, N: gl.constexpr, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load 8 rows of gate and 8 of up, from N of each."""
    H: gl.constexpr = SHAPE.value.hidden
    if order(SHAPE, N, H, 2) == "pairs":
        for i in range(num_chunks(H, smem.shape[1])):
            slot, phase = put_chunk(weight, of_gate, i, H, 0, smem, ready, empty, slot, phase, SHAPE)
            slot, phase = put_chunk(weight, of_up, i, H, 0, smem, ready, empty, slot, phase, SHAPE)
    else:
        slot, phase = _put_rows(weight, of_gate, H, smem, ready, empty, slot, phase, SHAPE)
        slot, phase = _put_rows(weight, of_up, H, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def _put_pairs(weight, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load the program's tiles of an MLP's W_gate_up, alternately of gate and up."""
    INNER: gl.constexpr = SHAPE.value.intermediate
    for tile in range(gl.program_id(0), INNER // 8, SHAPE.value.programs):
        slot, phase = _put_two(weight, tile * 8, INNER + tile * 8, INNER, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def _ask_for_pages(gate_up, chosen, SHAPE: gl.constexpr):
    """Prefetch a line of each of the program's tiles of the experts' gate and up, so that TLB misses overlap.

    Since the last step, other experts have evicted their translations; misses one after the other delay the stream.
    """
    H: gl.constexpr = SHAPE.value.hidden
    INNER: gl.constexpr = SHAPE.value.intermediate
    COUNT: gl.constexpr = SHAPE.value.chosen
    i = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))  # gate and up of at most 16 tiles
    tile = gl.program_id(0) + i // 2 * SHAPE.value.programs
    tile = gl.where(tile < COUNT * INNER // 8, tile, gl.program_id(0))
    expert = one_of(chosen, tile // (INNER // 8), COUNT).to(gl.int64)
    prefetch(gate_up + (expert * (2 * INNER) + i % 2 * INNER + tile % (INNER // 8) * 8) * H)


@gluon.jit
def _put_gate_up(gate_up, experts, tile, COUNT: gl.constexpr, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load the program's tiles of gate and up of a token's first COUNT experts, from `tile` on.

    gate_up: (experts, 2 intermediate, hidden). experts: a tuple. Also returns the program's next tile.
    """
    H: gl.constexpr = SHAPE.value.hidden
    INNER: gl.constexpr = SHAPE.value.intermediate
    while tile < COUNT * INNER // 8:
        expert = one_of(experts, tile // (INNER // 8), COUNT)
        weight = gate_up + expert.to(gl.int64) * (2 * INNER * H)
        row = tile % (INNER // 8) * 8
        N: gl.constexpr = SHAPE.value.inner
        slot, phase = _put_two(weight, row, INNER + row, N, smem, ready, empty, slot, phase, SHAPE)
        tile += SHAPE.value.programs
    return tile, slot, phase


@gluon.jit
def _put_down(down, chosen, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load the program's tiles of W_down, with the columns of all chosen experts next to each other.

    down: (experts, hidden, intermediate). chosen: a tuple of experts.
    """
    P: gl.constexpr = SHAPE.value.programs
    H: gl.constexpr = SHAPE.value.hidden
    INNER: gl.constexpr = SHAPE.value.inner
    CHUNKS: gl.constexpr = num_chunks(INNER, smem.shape[1])
    if order(SHAPE, H, INNER, 1) == "chunks":
        for i in range(CHUNKS):
            for tile in range(gl.program_id(0), H // 8, P):
                slot, phase = _put_chunk_of_experts(down, chosen, tile, i, smem, ready, empty, slot, phase, SHAPE)
    else:
        for tile in range(gl.program_id(0), H // 8, P):
            for i in gl.static_range(CHUNKS):
                slot, phase = _put_chunk_of_experts(down, chosen, tile, i, smem, ready, empty, slot, phase, SHAPE)
    return slot, phase


@gluon.jit
def _shared_experts(layer, SHAPE: gl.constexpr):
    """Return a token's first experts, which do not depend on the token."""
    first = gl.where(layer < SHAPE.value.dense_layers, 0, SHAPE.value.experts)
    found = ()
    COUNT: gl.constexpr = SHAPE.value.shared
    for i in gl.static_range(COUNT):
        one = first + i
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    return found


@gluon.jit
def _put_chunk_of_experts(down, chosen, tile, i, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Load chunk i of 8 rows of the chosen experts' W_down next to each other."""
    H: gl.constexpr = SHAPE.value.hidden
    INNER: gl.constexpr = SHAPE.value.intermediate
    COUNT: gl.constexpr = SHAPE.value.chosen
    OF_EXPERT: gl.constexpr = INNER // DIMS  # slices
    HALF: gl.constexpr = smem.shape[1] // 2
    k_slice, row = slices_and_rows(smem, HALF)
    mbarrier.wait(empty.index(slot), phase)
    for half in gl.static_range(2):
        number = (2 * i + half) * HALF + k_slice
        expert = one_of(chosen, number // OF_EXPERT, COUNT)
        of_slice = expert.to(gl.int64) * (H * INNER) + number % OF_EXPERT * DIMS
        rows = down + (of_slice[:, None] + ((tile * 8 + row) * INNER)[None, :])
        inside = (number < COUNT * OF_EXPERT)[:, None] & (row >= 0)[None, :]
        put_half(rows, inside, half, 0, smem, slot, SHAPE)
    async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
    return following(slot, phase, 1, SHAPE.value.slots)


@gluon.jit
def produce(
    weights_ptr, pool_ptr, table_ptr, smem, ready, empty, experts_smem, is_chosen, num_layers, num_keys, layer_stride,
    block_stride, SHAPE: gl.constexpr,
):  # fmt: skip
    """Fill slots, as they become empty, with the program's weights, keys and values of all layers.

    is_chosen: completes a phase per layer, when `experts_smem` has the token's experts.
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
        if SHAPE.value.is_latent:
            absorbing = gl.load(of_layer + LATENT).to(POINTER)
            expanding = gl.load(of_layer + LATENT + 1).to(POINTER)
            slot, phase = put_absorbing(absorbing, ring, ready, empty, slot, phase, SHAPE)
            slot, phase = put_latents(
                of_pool, table_ptr, num_keys, smem, ready, empty, slot, phase, block_stride, SHAPE
            )
            slot, phase = put_expanding(expanding, ring, ready, empty, slot, phase, SHAPE)
        else:
            slot, phase = put_kv(of_pool, table_ptr, num_keys, smem, ready, empty, slot, phase, block_stride, SHAPE)
        slot, phase = _put_weight(output, H, SHAPE.value.attended, ring, ready, empty, slot, phase, SHAPE)
        if SHAPE.value.experts:
            router = gl.load(of_layer + ROUTER).to(gl.pointer_type(gl.bfloat16))
            slot, phase = _put_weight(router, SHAPE.value.experts, H, smem, ready, empty, slot, phase, SHAPE)
            tile = gl.program_id(0)
            SHARED: gl.constexpr = SHAPE.value.shared
            if SHARED:  # while the others are chosen
                experts = _shared_experts(layer, SHAPE)
                tile, slot, phase = _put_gate_up(
                    gate_up, experts, tile, SHARED, ring, ready, empty, slot, phase, SHAPE
                )
            mbarrier.wait(is_chosen.index(0), layer & 1)
            CHOSEN: gl.constexpr = SHAPE.value.chosen
            chosen = chosen_experts(experts_smem, CHOSEN)
            _ask_for_pages(gate_up, chosen, SHAPE)
            tile, slot, phase = _put_gate_up(gate_up, chosen, tile, CHOSEN, ring, ready, empty, slot, phase, SHAPE)
            slot, phase = _put_down(down, chosen, ring, ready, empty, slot, phase, SHAPE)
        else:
            slot, phase = _put_pairs(gate_up, ring, ready, empty, slot, phase, SHAPE)
            slot, phase = _put_weight(down, H, SHAPE.value.inner, ring, ready, empty, slot, phase, SHAPE)
