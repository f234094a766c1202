"""Latent attention of a program, absorbed: one KV head, the latents, which are keys and, but for k_rope, values.

    absorbed_h = W_UK_h^T q_nope_h,  a part of it      y_h = sum of softmax([absorbed_h | q_rope_h] [c | k_rope]^T) c
    attended_h = W_UV_h y_h,  a part of it

Programs share the keys for 8 heads each. Latents are longer than a slot: a tile of keys is in several.
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
from kernels.gpu.persistent.ll_protocol import VECTOR, flagged, receive, receive_vector
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

QUERY = gl.constexpr(DIMS.value + ROPE.value)  # numbers of a head's query
HEAD_A_WARP = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [8, 1], [1, 0]))  # (heads, ROPE)
PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))  # (RANK,)
QUERIES = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 2))
KEYS_TRANSPOSED = gl.constexpr(gl.DotOperandLayout(1, PRODUCT, 2))


@gluon.jit
def head_gemv(words_ptr, first, LENGTH: gl.constexpr, flag, smem, ready, empty, slot, phase, SHAPE: gl.constexpr):
    """A slot of rows of LENGTH times a vector at `words_ptr + first`: (SLICES * DIMS / LENGTH, 8), in whose order.

    Slices of the slot are of one row's K, or of other rows. Returns the slot after it and its phase, too.
    """
    word = gl.arange(0, COLUMNS, VECTOR)
    x = receive(words_ptr, first + word % LENGTH, flag, 4)
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
    """Rows (n, 8), one after the other."""
    layout: gl.constexpr = rows.type.layout
    n = gl.arange(0, rows.shape[0], gl.SliceLayout(1, layout))[:, None]
    at = ptr + n * 8 + gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    gl.store(at, flagged(rows, flag))


@gluon.jit
def attend_latents(
    qkv_ptr, absorbed_ptr, partial_ptr, latent_ptr, attended_ptr, pool_ptr, norm_ptr, rotation_ptr, stamps, smem,
    ready, empty, slot, phase, flag, num_keys, kv_slot, eps, scale, block_stride, SHAPE: gl.constexpr,
):  # fmt: skip
    """From words of W_qkv x to those of all heads' outputs before W_o. See `grouped.attend`.

    norm_ptr: of c. rotation_ptr: cosines and signed sines of the position (2, ROPE).
    """
    SPLITS: gl.constexpr = SHAPE.value.splits
    PART: gl.constexpr = SHAPE.value.combined
    program = gl.program_id(0)
    if program < SHAPE.value.heads * RANK // HEAD_ROWS:
        head = program // (RANK // HEAD_ROWS)
        rows, slot, phase = head_gemv(qkv_ptr, head * QUERY, DIMS, flag, smem, ready, empty, slot, phase, SHAPE)
        _store_rows(absorbed_ptr + program * HEAD_ROWS, rows, flag)
    stamp(stamps, "rotate", SHAPE)
    group, first_tile, num_tiles = tiles_of_split(num_keys, SHAPE)
    if num_tiles > 0:
        slot, phase = _attend_split(
            qkv_ptr, absorbed_ptr, partial_ptr, pool_ptr, norm_ptr, rotation_ptr, stamps, smem, ready, empty, slot,
            phase, flag, group, first_tile, num_tiles, num_keys, kv_slot, eps, scale, block_stride, SHAPE,
        )  # fmt: skip
    elif program < SHAPE.value.kv_heads * SPLITS:
        _store_nothing(partial_ptr, flag, group, SHAPE)
    stamp(stamps, "receive partials", SHAPE)
    if program < SHAPE.value.kv_heads * SPLITS:
        _combine(partial_ptr + program * SHAPE.value.combined_words, latent_ptr + program * PART, flag, SHAPE)
    stamp(stamps, "values", SHAPE)
    if program < SHAPE.value.heads * DIMS // VALUE_ROWS:
        head = program // (DIMS // VALUE_ROWS)
        rows, slot, phase = head_gemv(latent_ptr, head * RANK, RANK, flag, smem, ready, empty, slot, phase, SHAPE)
        _store_rows(attended_ptr + program * VALUE_ROWS, rows, flag)
    return slot, phase


@gluon.jit
def _receive_rope(qkv_ptr, rotation_ptr, flag, group, SHAPE: gl.constexpr):
    """Rotated q_rope of the group's heads (HEADS, ROPE) and k_rope (1, ROPE) of the new token, in shared memory."""
    WORDS: gl.constexpr = 4 * HEADS * ROPE
    word = gl.arange(0, WORDS, VECTOR)
    row = word // ROPE % (2 * HEADS)
    k_rope = SHAPE.value.heads * QUERY + RANK
    of_row = gl.where(row < HEADS, (group * HEADS + row) * QUERY + DIMS, k_rope)
    dim = gl.where(word >= WORDS // 2, word ^ (ROPE // 2), word) % ROPE
    received = gl.allocate_shared_memory(gl.float32, [WORDS], FLAT)
    received.store(receive(qkv_ptr, of_row + dim, flag, WORDS // 256))
    both = received._reinterpret(gl.float32, [4 * HEADS, ROPE], FLAT2)
    x, swapped = both.slice(0, 2 * HEADS).load(HEAD_A_WARP), both.slice(2 * HEADS, 2 * HEADS).load(HEAD_A_WARP)
    dims = gl.arange(0, ROPE, gl.SliceLayout(0, HEAD_A_WARP))
    cos = gl.load(rotation_ptr + dims).to(gl.float32)
    sin = gl.load(rotation_ptr + ROPE + dims).to(gl.float32)
    rotated = gl.allocate_shared_memory(gl.float32, [2 * HEADS, ROPE], FLAT2)
    rotated.store(x * cos[None, :] + swapped * sin[None, :])
    return rotated


@gluon.jit
def _attend_split(
    qkv_ptr, absorbed_ptr, partial_ptr, pool_ptr, norm_ptr, rotation_ptr, stamps, smem, ready, empty, slot, phase,
    flag, group, first_tile, num_tiles, num_keys, kv_slot, eps, scale, block_stride, SHAPE: gl.constexpr,
):  # fmt: skip
    """Norm, rotate and store the new latent, and attend to a split's keys with the new one, if it has that."""
    BLOCK: gl.constexpr = SHAPE.value.block_size
    last_tile = (num_keys - 1) // KEYS
    has_new = first_tile + num_tiles > last_tile
    of_heads = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    rotated = _receive_rope(qkv_ptr, rotation_ptr, flag, group, SHAPE)
    q_rope = rotated.slice(0, HEADS).load(HEAD_A_WARP) * scale
    k_rope = rotated.slice(HEADS, 1).load(HEAD_A_WARP)
    high, low = split_bfloat16(q_rope)
    queries_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 2 * HEADS, ROPE], VALUES_SHARED)
    by_halves = queries_rope._reinterpret(gl.bfloat16, [1, 2, HEADS, ROPE], HALVES_SHARED)
    by_halves.store(gl.join(high, low).permute((2, 0, 1)).reshape([1, 2, HEADS, ROPE]))
    of_heads.index(0).store(gl.sum(q_rope * k_rope, axis=1))
    dims = gl.arange(0, RANK, PAIRS)
    c = receive(qkv_ptr + SHAPE.value.heads * QUERY, dims, flag, 2)
    c = c * gl.rsqrt(gl.sum(c * c, axis=0) / RANK + eps) * gl.load(norm_ptr + dims).to(gl.float32)
    if has_new & (group == 0) & (kv_slot >= 0):
        at = pool_ptr + (kv_slot // BLOCK).to(gl.int64) * block_stride + kv_slot % BLOCK * (RANK + ROPE)
        gl.store(at + dims, c.to(gl.bfloat16))
        rope_dims = gl.arange(0, ROPE, gl.SliceLayout(0, HEAD_A_WARP))
        gl.store((at + RANK + rope_dims)[None, :], k_rope.to(gl.bfloat16))
    new_value = gl.allocate_shared_memory(gl.float32, [RANK], FLAT)
    new_value.store(gl.where(has_new, c, 0.0))
    stamp(stamps, "receive queries", SHAPE)
    q = receive_vector(absorbed_ptr + group * (HEADS * RANK), flag, HEADS * RANK, HEADS * RANK) * scale
    q = q.reshape([HEADS, RANK])
    value = new_value.load(gl.SliceLayout(0, q.type.layout))
    of_heads.index(1).store(gl.sum(q * value[None, :], axis=1))
    high, low = split_bfloat16(q.reshape([HEADS, RANK // DIMS, DIMS]))
    queries = gl.allocate_shared_memory(gl.bfloat16, [RANK // DIMS, 2 * HEADS, DIMS], VALUES_SHARED)
    by_halves = queries._reinterpret(gl.bfloat16, [RANK // DIMS, 2, HEADS, DIMS], HALVES_SHARED)
    by_halves.store(gl.join(high, low).permute((1, 3, 0, 2)))
    new_score = of_heads.index(0).load(OF_HEAD) + of_heads.index(1).load(OF_HEAD)
    row_max = gl.where(has_new, new_score, NONE)
    row_sum = gl.where(has_new, 1.0, 0.0) + row_max * 0.0
    scores = gl.allocate_shared_memory(gl.float32, [1, HEADS, KEYS], FLAT2)
    probs = gl.allocate_shared_memory(gl.bfloat16, [1, 2 * HEADS, KEYS], VALUES_SHARED)
    stamp(stamps, "tiles", SHAPE)
    acc, row_max, row_sum, slot, phase = _attend_tiles(
        queries, queries_rope, row_max, row_sum, of_heads.index(0), scores, probs, smem, ready, empty, slot, phase,
        first_tile, num_tiles, num_keys, SHAPE,
    )  # fmt: skip
    stamp(stamps, "store partials", SHAPE)
    of_heads.index(0).store(gl.where(has_new, gl.exp2(new_score - row_max), 0.0))
    _store_partials(partial_ptr, acc, of_heads.index(0), new_value, row_max, row_sum, flag, group, SHAPE)
    return slot, phase


@gluon.jit
def _attend_tiles(
    queries, queries_rope, row_max, row_sum, of_heads, scores, probs, smem, ready, empty, slot, phase, first_tile,
    num_tiles, num_keys, SHAPE: gl.constexpr,
):  # fmt: skip
    """Online softmax over the split's tiles of cached latents; a sum for each DIMS of them."""
    SLOTS: gl.constexpr = SHAPE.value.slots
    PARTS: gl.constexpr = RANK // DIMS
    latents = smem._reinterpret(gl.bfloat16, [SLOTS, KEYS, DIMS], VALUES_SHARED)
    ropes = rope_slots(smem, SHAPE)
    acc = ()
    for part in gl.static_range(PARTS):  # noqa: B007  `_` has another type below
        zeros = gl.zeros([2 * HEADS, DIMS], gl.float32, PRODUCT)
        acc = acc + (zeros,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    for tile in range(first_tile, first_tile + num_tiles):
        wait_for(ready, slot, phase, LATENT_SLOTS, SLOTS)
        qk = gl.zeros([2 * HEADS, KEYS], gl.float32, PRODUCT)
        for i in gl.static_range(PARTS):
            at, _ = following(slot, phase, i, SLOTS)
            qk = mma_v2(queries.index(i).load(QUERIES), latents.index(at).permute((1, 0)).load(KEYS_TRANSPOSED), qk)
        at, _ = following(slot, phase, PARTS, SLOTS)
        rope = ropes.index(at).slice(0, KEYS).permute((1, 0)).load(KEYS_TRANSPOSED)
        qk = mma_v2(queries_rope.index(0).load(QUERIES), rope, qk)
        score = gl.sum(qk.reshape([2, HEADS, KEYS]), axis=0)
        keys = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, score.type.layout))
        scores.index(0).store(gl.where((keys < num_keys - 1)[None, :], score, NONE))
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
def _store_partials(partial_ptr, acc, of_heads, new_value, row_max, row_sum, flag, group, SHAPE: gl.constexpr):
    """Store the sums for the programs that combine them, with the maximum and sum of each head."""
    PART: gl.constexpr = SHAPE.value.combined
    SPLITS: gl.constexpr = SHAPE.value.splits
    split = gl.program_id(0) % SPLITS
    of_group = partial_ptr + group * (SPLITS * SHAPE.value.combined_words)
    for i in gl.static_range(RANK // DIMS):
        value = new_value.slice(i * DIMS, DIMS)
        _store_sums(of_group + split * PART, acc[i], i * DIMS, of_heads, value, flag, SHAPE)
    _store_row_stats(of_group, row_max, row_sum, flag, SHAPE)


@gluon.jit
def _store_sums(ptr, acc, first: gl.constexpr, of_heads, new_value, flag, SHAPE: gl.constexpr):
    """Store acc (2 HEADS, DIMS), of the numbers from `first` on, with the new key's part. ptr: of the split."""
    PART: gl.constexpr = SHAPE.value.combined
    y = gl.sum(acc.reshape([2, HEADS, DIMS]), axis=0)
    layout: gl.constexpr = y.type.layout
    value = new_value.load(gl.SliceLayout(0, layout))
    y += of_heads.load(gl.SliceLayout(1, layout))[:, None] * value[None, :]
    head = gl.arange(0, HEADS, gl.SliceLayout(1, layout))[:, None]
    dims = head * RANK + first + gl.arange(0, DIMS, gl.SliceLayout(0, layout))[None, :]
    gl.store(ptr + dims // PART * SHAPE.value.combined_words + dims % PART, flagged(y, flag))


@gluon.jit
def _store_row_stats(of_group, row_max, row_sum, flag, SHAPE: gl.constexpr):
    """Maximum and sum of each head, for all programs that combine some of its numbers."""
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
    """What a split without keys adds."""
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
    """Add up the program's numbers of all splits. ptr: its words. to_ptr: for its numbers."""
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
