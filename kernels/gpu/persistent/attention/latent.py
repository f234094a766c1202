"""Absorbed latent attention of a program: one KV head, the latents, as keys and, without k_rope, as values.

    absorbed_h = W_UK_h^T q_nope_h,  a part of it      y_h = sum of softmax([absorbed_h | q_rope_h] [c | k_rope]^T) c
    attended_h = W_UV_h y_h,  a part of it

Programs split the keys for each group of 8 heads. Latents are longer than a slot, so a tile of keys fills several.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.gpu.persistent.attention.softmax import (
    HALVES_SHARED,
    HEADS,
    NONE,
    OF_HEAD,
    PROBS,
    PRODUCT,
    VALUES,
    new_probs,
    times_of_heads,
)
from kernels.gpu.persistent.attention.tiles import HEAD_ROWS, LATENT_SLOTS, RANK, ROPE, VALUE_ROWS, rope_slots
from kernels.gpu.persistent.ll_protocol import VECTOR, ask, flagged, receive, receive_asked, receive_vector
from kernels.gpu.persistent.operand import (
    FLAT,
    FLAT2,
    allocate_operand,
    chunk_of,
    multiply,
    split_bfloat16,
    store_operand,
    sum_columns,
)
from kernels.gpu.persistent.ring import (
    COLUMNS,
    DIMS,
    KEYS,
    SLICES,
    VALUES_SHARED,
    barrier,
    following,
    release,
    tiles_of_split,
    wait_for,
)
from kernels.gpu.persistent.stamps import stamp

QUERY = gl.constexpr(DIMS.value + ROPE.value)  # length of a head's query
HEAD_A_WARP = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [8, 1], [1, 0]))  # (heads, ROPE)
REST = gl.constexpr(2048)  # words that a program asks for in addition to q_nope
PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))  # (RANK,)
QUERIES = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 2))
KEYS_TRANSPOSED = gl.constexpr(gl.DotOperandLayout(1, PRODUCT, 2))
EIGHT_ROWS = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [8, 1], [1, 0]))  # of a slot, a period of its swizzle


@gluon.jit
def attend_latents(
    qkv_ptr, absorbed_ptr, partial_ptr, latent_ptr, attended_ptr, pool_ptr, norm_ptr, rotation_ptr, stamps, smem,
    ready, empty, slot, phase, flag, num_keys, kv_slot, eps, scale, block_stride, SHAPE: gl.constexpr,
):  # fmt: skip
    """Compute words of the heads' outputs, which W_o multiplies, from words of W_qkv x. See `grouped.attend`.

    norm_ptr: of c. rotation_ptr: cosines and signed sines of the position (2, ROPE).
    """
    HEADS_IN_ALL: gl.constexpr = SHAPE.value.heads
    IN_GROUPS: gl.constexpr = SHAPE.value.kv_heads * SHAPE.value.splits  # programs
    program = gl.program_id(0)
    group, first_tile, num_tiles = tiles_of_split(num_keys, SHAPE)
    factors = _factors(norm_ptr, rotation_ptr)
    word = gl.arange(0, COLUMNS, VECTOR)
    head = gl.minimum(program // (RANK // HEAD_ROWS), HEADS_IN_ALL - 1)
    q_nope = receive(qkv_ptr, head * QUERY + word % DIMS, flag, 4)
    rest = _rest_words(gl.minimum(group, SHAPE.value.kv_heads - 1), SHAPE)
    asked = ask(qkv_ptr, rest, REST // 256)
    if program < HEADS_IN_ALL * RANK // HEAD_ROWS:
        rows, slot, phase = _multiply_slot(q_nope, DIMS, smem, ready, empty, slot, phase, SHAPE)
        _store_rows(absorbed_ptr + program * HEAD_ROWS, rows, flag)
    stamp(stamps, "rotate", SHAPE)
    if num_tiles > 0:
        numbers = receive_asked(asked, qkv_ptr, rest, flag, REST // 256)
        slot, phase = _attend_split(
            numbers, absorbed_ptr, partial_ptr, pool_ptr, factors, stamps, smem, ready, empty, slot, phase, flag,
            group, first_tile, num_tiles, num_keys, kv_slot, eps, scale, block_stride, SHAPE,
        )  # fmt: skip
    elif program < IN_GROUPS:
        _store_nothing(partial_ptr, flag, group, SHAPE)
    stamp(stamps, "receive partials", SHAPE)
    if program < IN_GROUPS:
        PART: gl.constexpr = SHAPE.value.combined
        _combine(partial_ptr + program * SHAPE.value.combined_words, latent_ptr + program * PART, flag, SHAPE)
    stamp(stamps, "values", SHAPE)
    if program < HEADS_IN_ALL * DIMS // VALUE_ROWS:
        head = program // (DIMS // VALUE_ROWS)
        y = receive(latent_ptr, head * RANK + word % RANK, flag, 4)
        rows, slot, phase = _multiply_slot(y, RANK, smem, ready, empty, slot, phase, SHAPE)
        _store_rows(attended_ptr + program * VALUE_ROWS, rows, flag)
    return slot, phase


@gluon.jit
def _factors(norm_ptr, rotation_ptr):
    """Load weights of c's norm (RANK,), cosines and signed sines (ROPE,) early, since warps issue in order."""
    dims = gl.arange(0, ROPE, gl.SliceLayout(0, HEAD_A_WARP))
    cos = gl.load(rotation_ptr + dims).to(gl.float32)
    sin = gl.load(rotation_ptr + ROPE + dims).to(gl.float32)
    return gl.load(norm_ptr + gl.arange(0, RANK, PAIRS)).to(gl.float32), cos, sin


@gluon.jit
def _multiply_slot(x, LENGTH: gl.constexpr, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """Multiply a slot of rows of LENGTH by x (COLUMNS,), which repeats LENGTH numbers: (rows / 8, 8).

    Also returns the next slot and its phase.
    """
    operand = allocate_operand(SHAPE)
    store_operand(x, 0, operand)
    wait_for(ready, slot, phase, 1, SHAPE.value.slots)
    y = multiply(chunk_of(operand, 0, SLICES), smem.index(slot), smem.index(slot), 1.0)
    rows, _ = sum_columns(y)
    rows = gl.sum(rows.reshape([SLICES * DIMS // LENGTH, LENGTH // DIMS, 8]), axis=1)
    slot, phase = following(slot, phase, 1, SHAPE.value.slots)
    barrier()  # every thread has read the slot
    release(empty, slot, 1, SHAPE.value.slots)
    return rows, slot, phase


@gluon.jit
def _store_rows(ptr, rows, flag):
    """Store rows (n, 8) one after the other, as words."""
    layout: gl.constexpr = rows.type.layout
    n = gl.arange(0, rows.shape[0], gl.SliceLayout(1, layout))[:, None]
    at = ptr + n * 8 + gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    gl.store(at, flagged(rows, flag))


@gluon.jit
def _rest_words(group, SHAPE: gl.constexpr):
    """Return words of W_qkv x (REST,): the group's q_rope, it with halves swapped, c, k_rope, it swapped, padding."""
    ROPES: gl.constexpr = HEADS * ROPE
    word = gl.arange(0, REST, VECTOR)
    c = SHAPE.value.heads * QUERY
    q = (group * HEADS + word // ROPE % HEADS) * QUERY + DIMS + (word ^ gl.where(word < ROPES, 0, ROPE // 2)) % ROPE
    k = c + RANK + (word ^ gl.where(word % (2 * ROPE) < ROPE, 0, ROPE // 2)) % ROPE
    return gl.where(word < 2 * ROPES, q, gl.where(word < 2 * ROPES + RANK, c + word - 2 * ROPES, k))


@gluon.jit
def _attend_split(
    rest, absorbed_ptr, partial_ptr, pool_ptr, factors, stamps, smem, ready, empty, slot, phase, flag, group,
    first_tile, num_tiles, num_keys, kv_slot, eps, scale, block_stride, SHAPE: gl.constexpr,
):  # fmt: skip
    """Norm, rotate and store the new latent, and attend to a split's keys. rest: the numbers of `_rest_words`."""
    BLOCK: gl.constexpr = SHAPE.value.block_size
    ROPES: gl.constexpr = HEADS * ROPE
    has_new = first_tile + num_tiles > (num_keys - 1) // KEYS
    received = gl.allocate_shared_memory(gl.float32, [REST], FLAT)
    received.store(rest)
    norm, cos, sin = factors
    q = received.slice(0, ROPES)._reinterpret(gl.float32, [HEADS, ROPE], FLAT2).load(HEAD_A_WARP)
    swapped = received.slice(ROPES, ROPES)._reinterpret(gl.float32, [HEADS, ROPE], FLAT2).load(HEAD_A_WARP)
    c = received.slice(2 * ROPES, RANK).load(PAIRS)
    k = received.slice(2 * ROPES + RANK, ROPE).load(gl.SliceLayout(0, HEAD_A_WARP))
    swapped_k = received.slice(2 * ROPES + RANK + ROPE, ROPE).load(gl.SliceLayout(0, HEAD_A_WARP))
    high, low = split_bfloat16((q * cos[None, :] + swapped * sin[None, :]) * scale)
    queries_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 2 * HEADS, ROPE], VALUES_SHARED)
    by_halves = queries_rope._reinterpret(gl.bfloat16, [1, 2, HEADS, ROPE], HALVES_SHARED)
    by_halves.store(gl.join(high, low).permute((2, 0, 1)).reshape([1, 2, HEADS, ROPE]))
    k_rope = (k * cos + swapped_k * sin).to(gl.bfloat16)
    c = c * gl.rsqrt(gl.sum(c * c, axis=0) / RANK + eps) * norm
    new_key = gl.allocate_shared_memory(gl.float32, [RANK], FLAT)
    new_key.store(c)
    if has_new & (group == 0) & (kv_slot >= 0):
        at = pool_ptr + (kv_slot // BLOCK).to(gl.int64) * block_stride + kv_slot % BLOCK * (RANK + ROPE)
        gl.store(at + gl.arange(0, RANK, PAIRS), c.to(gl.bfloat16))
        gl.store(at + RANK + gl.arange(0, ROPE, gl.SliceLayout(0, HEAD_A_WARP)), k_rope)
    stamp(stamps, "receive queries", SHAPE)
    q = receive_vector(absorbed_ptr + group * (HEADS * RANK), flag, HEADS * RANK, HEADS * RANK) * scale
    high, low = split_bfloat16(q.reshape([HEADS, RANK // DIMS, DIMS]))
    queries = gl.allocate_shared_memory(gl.bfloat16, [RANK // DIMS, 2 * HEADS, DIMS], VALUES_SHARED)
    by_halves = queries._reinterpret(gl.bfloat16, [RANK // DIMS, 2, HEADS, DIMS], HALVES_SHARED)
    by_halves.store(gl.join(high, low).permute((1, 3, 0, 2)))
    stamp(stamps, "tiles", SHAPE)
    acc, row_max, row_sum, slot, phase = _attend_tiles(
        queries,
        queries_rope,
        new_key,
        k_rope,
        smem,
        ready,
        empty,
        slot,
        phase,
        first_tile,
        num_tiles,
        num_keys,
        SHAPE,
    )
    stamp(stamps, "store partials", SHAPE)
    _store_partials(partial_ptr, acc, row_max, row_sum, flag, group, SHAPE)
    return slot, phase


@gluon.jit
def _attend_tiles(
    queries, queries_rope, new_key, k_rope, smem, ready, empty, slot, phase, first_tile, num_tiles, num_keys,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Attend to the split's tiles of latents by online softmax; one accumulator for each DIMS of their numbers."""
    SLOTS: gl.constexpr = SHAPE.value.slots
    PARTS: gl.constexpr = RANK // DIMS
    latents = smem._reinterpret(gl.bfloat16, [SLOTS, KEYS, DIMS], VALUES_SHARED)
    ropes = rope_slots(smem, SHAPE)
    of_heads = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    scores = gl.allocate_shared_memory(gl.float32, [1, HEADS, KEYS], FLAT2)
    probs = gl.allocate_shared_memory(gl.bfloat16, [1, 2 * HEADS, KEYS], VALUES_SHARED)
    row_max = gl.full([HEADS], NONE, gl.float32, OF_HEAD)
    row_sum = gl.zeros([HEADS], gl.float32, OF_HEAD)
    acc = ()
    for part in gl.static_range(PARTS):  # noqa: B007  `_` has another type below
        zeros = gl.zeros([2 * HEADS, DIMS], gl.float32, PRODUCT)
        acc = acc + (zeros,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    for tile in range(first_tile, first_tile + num_tiles):
        wait_for(ready, slot, phase, LATENT_SLOTS, SLOTS)
        if tile == (num_keys - 1) // KEYS:
            _put_new_key(smem, new_key, k_rope, (num_keys - 1) % KEYS, slot, phase, SHAPE)
        at, _ = following(slot, phase, PARTS, SLOTS)
        rope = ropes.index(at).slice(0, KEYS).permute((1, 0)).load(KEYS_TRANSPOSED)
        none = gl.zeros([2 * HEADS, KEYS], gl.float32, PRODUCT)
        qk = mma_v2(queries_rope.index(0).load(QUERIES), rope, none)
        for i in gl.static_range(PARTS):  # each part has its own sum, so that none waits for another
            at, _ = following(slot, phase, i, SLOTS)
            qk += mma_v2(
                queries.index(i).load(QUERIES), latents.index(at).permute((1, 0)).load(KEYS_TRANSPOSED), none
            )
        score = gl.sum(qk.reshape([2, HEADS, KEYS]), axis=0)
        key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, score.type.layout))
        scores.index(0).store(gl.where((key < num_keys)[None, :], score, NONE))
        row_max, row_sum, factor = new_probs(scores, row_max, row_sum, probs, 1)
        of_heads.store(factor)
        sums_now = ()
        for i in gl.static_range(PARTS):
            at, _ = following(slot, phase, i, SLOTS)
            scaled = times_of_heads(acc[i], of_heads)
            one = mma_v2(probs.index(0).load(PROBS), latents.index(at).load(VALUES), scaled)
            sums_now = sums_now + (one,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
        acc = sums_now
        slot, phase = following(slot, phase, LATENT_SLOTS, SLOTS)
        barrier()  # every thread has read the slots
        release(empty, slot, LATENT_SLOTS, SLOTS)
    return acc, row_max, row_sum, slot, phase


@gluon.jit
def _put_new_key(smem, new_key, k_rope, row, slot, phase, SHAPE: gl.constexpr):
    """Put the new latent, which the pool may lack, into its row of the tile that begins at `slot`."""
    SLOTS: gl.constexpr = SHAPE.value.slots
    PARTS: gl.constexpr = RANK // DIMS
    latents = smem._reinterpret(gl.bfloat16, [SLOTS * KEYS // 8, 8, DIMS], VALUES_SHARED)
    ropes = smem._reinterpret(gl.bfloat16, [2 * SLOTS * KEYS // 8, 8, ROPE], VALUES_SHARED)
    is_row = (gl.arange(0, 8, gl.SliceLayout(1, EIGHT_ROWS)) == row % 8)[:, None]
    for i in gl.static_range(PARTS):
        at, _ = following(slot, phase, i, SLOTS)
        rows = latents.index(at * (KEYS // 8) + row // 8)
        new = new_key.slice(i * DIMS, DIMS).load(gl.SliceLayout(0, EIGHT_ROWS)).to(gl.bfloat16)
        rows.store(gl.where(is_row, new[None, :], rows.load(EIGHT_ROWS)))
    at, _ = following(slot, phase, PARTS, SLOTS)
    rows = ropes.index(at * (2 * KEYS // 8) + row // 8)
    rows.store(gl.where(is_row, k_rope[None, :], rows.load(EIGHT_ROWS)))


@gluon.jit
def _store_partials(partial_ptr, acc, row_max, row_sum, flag, group, SHAPE: gl.constexpr):
    """Store the sums for the programs that combine them, with the maximum and sum of each head."""
    PART: gl.constexpr = SHAPE.value.combined
    SPLITS: gl.constexpr = SHAPE.value.splits
    of_group = partial_ptr + group * (SPLITS * SHAPE.value.combined_words)
    of_split = of_group + gl.program_id(0) % SPLITS * PART
    for i in gl.static_range(RANK // DIMS):
        y = gl.sum(acc[i].reshape([2, HEADS, DIMS]), axis=0)
        head = gl.arange(0, HEADS, gl.SliceLayout(1, y.type.layout))[:, None]
        dims = head * RANK + i * DIMS + gl.arange(0, DIMS, gl.SliceLayout(0, y.type.layout))[None, :]
        gl.store(of_split + dims // PART * SHAPE.value.combined_words + dims % PART, flagged(y, flag))
    _store_row_stats(of_group, row_max, row_sum, flag, SHAPE)


@gluon.jit
def _store_row_stats(of_group, row_max, row_sum, flag, SHAPE: gl.constexpr):
    """Store the maximum and sum of each head for all programs that combine some of its numbers."""
    PART: gl.constexpr = SHAPE.value.combined
    SPLITS: gl.constexpr = SHAPE.value.splits
    OF_HEAD_PARTS: gl.constexpr = RANK // PART
    split = gl.program_id(0) % SPLITS
    head = gl.arange(0, HEADS, gl.SliceLayout(1, HEAD_A_WARP))[:, None]
    to = head * OF_HEAD_PARTS + gl.arange(0, OF_HEAD_PARTS, gl.SliceLayout(0, HEAD_A_WARP))[None, :]
    at = of_group + to * SHAPE.value.combined_words + SPLITS * PART + split
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, HEAD_A_WARP))[:, None]
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, HEAD_A_WARP))[:, None]
    gl.store(at, flagged(row_max + to * 0.0, flag))
    gl.store(at + SPLITS, flagged(row_sum + to * 0.0, flag))


@gluon.jit
def _store_nothing(partial_ptr, flag, group, SHAPE: gl.constexpr):
    """Store the partials of a split without keys: sums of zero and maxima of NONE."""
    PART: gl.constexpr = SHAPE.value.combined
    SPLITS: gl.constexpr = SHAPE.value.splits
    BLOCK: gl.constexpr = SHAPE.value.combined_words
    of_group = partial_ptr + group * (SPLITS * BLOCK)
    dims = gl.arange(0, HEADS * RANK, VECTOR)
    at = of_group + dims // PART * BLOCK + gl.program_id(0) % SPLITS * PART + dims % PART
    gl.store(at, flagged(dims * 0.0, flag))
    heads = gl.arange(0, HEADS, OF_HEAD) * 0.0
    _store_row_stats(of_group, heads + NONE, heads, flag, SHAPE)


@gluon.jit
def _combine(ptr, to_ptr, flag, SHAPE: gl.constexpr):
    """Combine the program's numbers from all splits. ptr: its words of partials. to_ptr: where the numbers go."""
    SPLITS: gl.constexpr = SHAPE.value.splits
    PART: gl.constexpr = SHAPE.value.combined
    partials = receive(ptr, gl.arange(0, SPLITS * PART, VECTOR), flag, SPLITS * PART // 256).reshape([SPLITS, PART])
    layout: gl.constexpr = partials.type.layout
    word = gl.arange(0, 256, gl.BlockedLayout([1], [32], [8], [0])) % (2 * SPLITS)
    stats = gl.allocate_shared_memory(gl.float32, [256], FLAT)
    stats.store(receive(ptr + SPLITS * PART, word, flag, 1))
    row_max = stats.slice(0, SPLITS).load(gl.SliceLayout(1, layout))
    row_sum = stats.slice(SPLITS, SPLITS).load(gl.SliceLayout(1, layout))
    weight = gl.exp2(row_max - gl.max(row_max, axis=0))
    weight = weight / gl.sum(weight * row_sum, axis=0)
    y = gl.sum(partials * weight[:, None], axis=0)
    gl.store(to_ptr + gl.arange(0, PART, gl.SliceLayout(0, layout)), flagged(y, flag))
