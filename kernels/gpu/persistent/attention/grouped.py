"""Grouped-query attention of a program: over its split of a KV head's keys, then its part of combining splits."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.gpu.persistent.attention.softmax import (
    HEADS,
    NONE,
    OF_HEAD,
    PROBS,
    PRODUCT,
    VALUES,
    new_probs,
    times_of_heads,
)
from kernels.gpu.persistent.ll_protocol import VECTOR, flagged, receive
from kernels.gpu.persistent.operand import FLAT, FLAT2, WIDTH, split_bfloat16
from kernels.gpu.persistent.ring import (
    BATCH,
    DIMS,
    KEYS,
    KEYS_SHARED,
    VALUES_SHARED,
    following,
    release,
    tiles_of_split,
    wait_for,
)
from kernels.gpu.persistent.stamps import stamp

HEAD_A_WARP = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))  # (heads, DIMS)
QUERIES = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, WIDTH))
KEYS_TRANSPOSED = gl.constexpr(gl.DotOperandLayout(1, PRODUCT, WIDTH))


@gluon.jit
def head_factors(norm_ptr, rotation_ptr, SHAPE: gl.constexpr):
    """Return the norm and rotation of q's heads and k as factors of x and of x with swapped halves (head_rows, DIMS).

    rotation_ptr: cosines and signed sines of the position (2, DIMS).
    """
    row = gl.arange(0, SHAPE.value.head_rows, gl.SliceLayout(1, HEAD_A_WARP))[:, None]
    dims = gl.arange(0, DIMS, gl.SliceLayout(0, HEAD_A_WARP))[None, :]
    of_row = norm_ptr + gl.where(row >= SHAPE.value.group, DIMS, 0)
    same = gl.load(gl.max_contiguous(gl.multiple_of(of_row + dims, [8, 8]), [1, 4])).to(gl.float32)
    other = gl.load(gl.max_contiguous(gl.multiple_of(of_row + (dims ^ (DIMS // 2)), [8, 8]), [1, 4])).to(gl.float32)
    cos = gl.load(gl.max_contiguous(gl.multiple_of(rotation_ptr + dims, [8, 8]), [1, 4])).to(gl.float32)
    sin = gl.load(gl.max_contiguous(gl.multiple_of(rotation_ptr + DIMS + dims, [8, 8]), [1, 4])).to(gl.float32)
    return same * cos, other * sin


@gluon.jit
def _receive_heads(qkv_ptr, flag, kv_head, SHAPE: gl.constexpr):
    """Receive q's heads, k and v of a KV head, and the same with their halves swapped: (head_rows, DIMS) each."""
    ROWS: gl.constexpr = SHAPE.value.head_rows
    GROUP: gl.constexpr = SHAPE.value.group
    WORDS: gl.constexpr = 2 * ROWS * DIMS
    word = gl.arange(0, WORDS, VECTOR)
    row = word // DIMS % ROWS
    k = SHAPE.value.heads + kv_head
    head = gl.where(row < GROUP, kv_head * GROUP + row, gl.where(row == GROUP, k, k + SHAPE.value.kv_heads))
    swapped = gl.where(word >= ROWS * DIMS, word ^ (DIMS // 2), word)
    received = gl.allocate_shared_memory(gl.float32, [WORDS], FLAT)
    received.store(receive(qkv_ptr, head * DIMS + swapped % DIMS, flag, WORDS // 256))
    both = received._reinterpret(gl.float32, [2 * ROWS, DIMS], FLAT2)
    return both.slice(0, ROWS).load(HEAD_A_WARP), both.slice(ROWS, ROWS).load(HEAD_A_WARP)


@gluon.jit
def attend(
    qkv_ptr, partial_ptr, attended_ptr, pool_ptr, factors, stamps, smem, ready, empty, slot, phase, flag,
    num_keys, kv_slot, eps, scale, block_stride, SHAPE: gl.constexpr,
):  # fmt: skip
    """Norm and rotate q and k, store k and v, attend to a split's keys, combine a part of the group's dimensions.

    num_keys: including the new key, which comes from `qkv_ptr` like the queries. pool_ptr: of the layer. kv_slot: of
    the new key, block id * block_size + offset; -1: not stored. Returns the slot after those of the keys, and its
    phase.
    """
    GROUP: gl.constexpr = SHAPE.value.group
    ROWS: gl.constexpr = SHAPE.value.head_rows
    BLOCK: gl.constexpr = SHAPE.value.block_size
    kv_head, first_tile, num_tiles = tiles_of_split(num_keys, SHAPE)
    last_tile = (num_keys - 1) // KEYS
    has_new = (first_tile <= last_tile) & (first_tile + num_tiles > last_tile)

    x, swapped = _receive_heads(qkv_ptr, flag, kv_head, SHAPE)
    stamp(stamps, "rotate", SHAPE)
    rotated = gl.allocate_shared_memory(gl.float32, [max(ROWS, HEADS.value), DIMS], FLAT2)
    of_heads = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    halves = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, DIMS], VALUES_SHARED)
    scores = gl.allocate_shared_memory(gl.float32, [BATCH, HEADS, KEYS], FLAT2)
    probs = gl.allocate_shared_memory(gl.bfloat16, [BATCH, 2 * HEADS, KEYS], VALUES_SHARED)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, HEAD_A_WARP))
    root = gl.where(row < GROUP, scale, 1.0)
    if SHAPE.value.has_qk_norms:
        root *= gl.rsqrt(gl.sum(x * x, axis=1) / DIMS + eps)
    same, other = factors
    rotated.slice(0, ROWS).store(gl.where((row <= GROUP)[:, None], (x * same + swapped * other) * root[:, None], x))
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, HEAD_A_WARP))
    dims = gl.arange(0, DIMS, gl.SliceLayout(0, HEAD_A_WARP))
    q = gl.where((heads < GROUP)[:, None], rotated.slice(0, HEADS).load(HEAD_A_WARP), 0.0)
    high, low = split_bfloat16(q)
    halves.index(0).store(high)
    halves.index(1).store(low)
    new_key = rotated.slice(GROUP, 1).load(HEAD_A_WARP)
    new_value = rotated.slice(GROUP + 1, 1)
    if has_new & (kv_slot >= 0):
        block = (kv_slot // BLOCK).to(gl.int64)
        at = pool_ptr + block * block_stride + (kv_head * BLOCK + kv_slot % BLOCK) * DIMS + dims
        gl.store(at[None, :], new_key.to(gl.bfloat16))
        gl.store((at + SHAPE.value.kv_heads * BLOCK * DIMS)[None, :], new_value.load(HEAD_A_WARP).to(gl.bfloat16))
    of_heads.store(gl.sum(q * new_key, axis=1))
    new_score = of_heads.load(OF_HEAD)
    row_max = gl.where(has_new, new_score, NONE)
    row_sum = gl.where(has_new, 1.0, 0.0) + row_max * 0.0
    queries = halves._reinterpret(gl.bfloat16, [2 * HEADS, DIMS], VALUES_SHARED).load(QUERIES)
    acc = gl.zeros([2 * HEADS, DIMS], gl.float32, PRODUCT)
    stamp(stamps, "tiles", SHAPE)
    acc, row_max, row_sum, slot, phase = _attend_tiles(
        queries, acc, row_max, row_sum, of_heads, scores, probs, smem, ready, empty, slot, phase, first_tile,
        num_tiles, num_keys, SHAPE,
    )  # fmt: skip
    stamp(stamps, "store partials", SHAPE)
    of_heads.store(gl.where(has_new, gl.exp2(new_score - row_max), 0.0))
    _store_partials(partial_ptr, acc, of_heads, new_value, row_max, row_sum, flag, kv_head, SHAPE)
    stamp(stamps, "receive partials", SHAPE)
    if gl.program_id(0) % SHAPE.value.splits * SHAPE.value.combined < GROUP * DIMS:
        _combine(partial_ptr, attended_ptr, flag, kv_head, stamps, SHAPE)
    return slot, phase


@gluon.jit
def _attend_tiles(
    queries, acc, row_max, row_sum, of_heads, scores, probs, smem, ready, empty, slot, phase, first_tile, num_tiles,
    num_keys, SHAPE: gl.constexpr,
):  # fmt: skip
    """Attend to the split's tiles of cached keys by online softmax, BATCH tiles at a time.

    of_heads, scores, probs: shared memory for intermediate results.
    """
    SLOTS: gl.constexpr = SHAPE.value.slots
    keys_smem = smem._reinterpret(gl.bfloat16, [SLOTS, KEYS, DIMS], KEYS_SHARED)
    values_smem = smem._reinterpret(gl.bfloat16, [SLOTS, KEYS, DIMS], VALUES_SHARED)
    for begin in range(first_tile, first_tile + num_tiles, BATCH):
        count = gl.minimum(BATCH, first_tile + num_tiles - begin)
        wait_for(ready, slot, phase, count, SLOTS)
        found = ()
        for i in gl.static_range(BATCH):
            at, _ = following(slot, phase, i, SLOTS)
            zeros = gl.zeros([2 * HEADS, KEYS], gl.float32, PRODUCT)
            qk = mma_v2(queries, keys_smem.index(at).permute((1, 0)).load(KEYS_TRANSPOSED), zeros)
            score = gl.sum(qk.reshape([2, HEADS, KEYS]), axis=0)
            found = found + (score,)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
        keys = gl.arange(0, KEYS, gl.SliceLayout(0, score.type.layout))
        for i in gl.static_range(BATCH):
            is_key = ((begin + i) * KEYS + keys < num_keys - 1) & (i < count)
            scores.index(i).store(gl.where(is_key[None, :], found[i], NONE))
        slot, phase = following(slot, phase, count, SLOTS)
        row_max, row_sum, factor = new_probs(scores, row_max, row_sum, probs, BATCH)
        release(empty, slot, count, SLOTS)
        of_heads.store(factor)
        acc = times_of_heads(acc, of_heads)
        wait_for(ready, slot, phase, count, SLOTS)
        for i in gl.static_range(BATCH):
            at, _ = following(slot, phase, i, SLOTS)  # probabilities beyond the last tile are zero
            value = values_smem.index(gl.where(i < count, at, slot)).load(VALUES)
            acc = mma_v2(probs.index(i).load(PROBS), value, acc)
        slot, phase = following(slot, phase, count, SLOTS)
        of_heads.store(factor)  # every thread has read the values
        release(empty, slot, count, SLOTS)
    return acc, row_max, row_sum, slot, phase


@gluon.jit
def _store_partials(partial_ptr, acc, of_heads, new_value, row_max, row_sum, flag, kv_head, SHAPE: gl.constexpr):
    """Store the accumulator for the splits that combine its dimensions, with the maximum and sum of each head."""
    GROUP: gl.constexpr = SHAPE.value.group
    SPLITS: gl.constexpr = SHAPE.value.splits
    PART: gl.constexpr = SHAPE.value.combined
    BLOCK: gl.constexpr = SHAPE.value.combined_words
    split = gl.program_id(0) % SPLITS
    y = gl.sum(acc.reshape([2, HEADS, DIMS]), axis=0)
    layout: gl.constexpr = y.type.layout
    value = new_value._reinterpret(gl.float32, [DIMS], FLAT).load(gl.SliceLayout(0, layout))
    y += of_heads.load(gl.SliceLayout(1, layout))[:, None] * value[None, :]
    head = gl.arange(0, HEADS, gl.SliceLayout(1, layout))[:, None]
    dims = head * DIMS + gl.arange(0, DIMS, gl.SliceLayout(0, layout))[None, :]
    at = partial_ptr + (kv_head * SPLITS + dims // PART) * BLOCK + split * PART + dims % PART
    gl.store(at, flagged(y, flag), mask=head < GROUP)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, HEAD_A_WARP))[:, None]
    to = head * (DIMS // PART) + gl.arange(0, DIMS // PART, gl.SliceLayout(0, HEAD_A_WARP))[None, :]
    at = partial_ptr + (kv_head * SPLITS + to) * BLOCK + SPLITS * PART + split
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, HEAD_A_WARP))[:, None]
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, HEAD_A_WARP))[:, None]
    gl.store(at, flagged(row_max + to * 0.0, flag), mask=head < GROUP)
    gl.store(at + SPLITS, flagged(row_sum + to * 0.0, flag), mask=head < GROUP)


@gluon.jit
def _combine(partial_ptr, attended_ptr, flag, kv_head, stamps, SHAPE: gl.constexpr):
    """Combine the program's dimensions from all splits and store them."""
    SPLITS: gl.constexpr = SHAPE.value.splits
    PART: gl.constexpr = SHAPE.value.combined
    BLOCK: gl.constexpr = SHAPE.value.combined_words
    PARTIALS: gl.constexpr = SPLITS * PART
    WORDS: gl.constexpr = BLOCK // 256
    WIDE: gl.constexpr = min(WORDS, 4)
    splits: gl.constexpr = gl.BlockedLayout([SPLITS, 1], [1, 32], [1, 8], [1, 0])
    split = gl.program_id(0) % SPLITS
    word = gl.arange(0, BLOCK, gl.BlockedLayout([WIDE], [32], [8], [0]))
    used: gl.constexpr = PARTIALS + 2 * SPLITS
    word = gl.where(word < used, word, used - WIDE + word % WIDE)
    words = receive(partial_ptr + (kv_head * SPLITS + split) * BLOCK, word, flag, WORDS)
    stamp(stamps, "combine", SHAPE)
    received = gl.allocate_shared_memory(gl.float32, [BLOCK], FLAT)
    received.store(words)
    row_max = received.slice(PARTIALS, SPLITS).load(gl.SliceLayout(1, splits))
    row_sum = received.slice(PARTIALS + SPLITS, SPLITS).load(gl.SliceLayout(1, splits))
    weight = gl.exp2(row_max - gl.max(row_max, axis=0))
    weight = weight / gl.sum(weight * row_sum, axis=0)
    partials = received.slice(0, PARTIALS)._reinterpret(gl.float32, [SPLITS, PART], FLAT2).load(splits)
    dims = split * PART + gl.arange(0, PART, gl.SliceLayout(0, splits))
    at = attended_ptr + kv_head * (SHAPE.value.group * DIMS) + dims
    gl.store(at, flagged(gl.sum(partials * weight[:, None], axis=0), flag))
