"""The kernel of `packed_stream`, in Gluon: a producer warp loads weights and x by TMA, consumer warps multiply them.

While the tensor cores multiply one part of a K step, the next part is dequantized. Triton would wait for each wgmma
with an operand in registers; so does `ptxas` if other instructions write the accumulators in between (see
`_consume`). Every program takes an equal share of the steps of all tiles ("stream-K"). If programs share a tile, the
last one to finish adds their partial sums, in the order of steps, so results do not depend on timing.

Layout and reference: `kernels/quantization/packed_weights.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.launch import prefetch
from kernels.gpu.quantization.packed_parts import chunks_of, dequantize_part, high_bits_of, parts_of, words_of
from kernels.gpu.quantization.row_scales import column_of, scales_layout

BLOCK_N = gl.constexpr(128)  # columns of y, i.e. rows of W, per tile
BOX = gl.constexpr(64)  # columns of x per TMA load
LINE = gl.constexpr(32)  # pairs per line of the L2 cache
PRODUCER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _load_weights(
    words_desc, high_desc, words_smem, high_smem, ready, tile, step, stage, X_BYTES: gl.constexpr, BITS: gl.constexpr
):
    """Start to load a step's weights. The stage is `ready` once they and X_BYTES of x have arrived."""
    CHUNKS: gl.constexpr = chunks_of(BITS)
    WORDS: gl.constexpr = words_of(BITS)
    HAS_HIGH: gl.constexpr = high_bits_of(BITS) > 0
    HIGH_BYTES: gl.constexpr = BLOCK_N * WORDS * high_smem.dtype.primitive_bitwidth // 8 if HAS_HIGH else 0
    mbarrier.expect(ready.index(stage), CHUNKS * BLOCK_N * WORDS * 2 + HIGH_BYTES + X_BYTES)
    for chunk in gl.static_range(CHUNKS):
        at = (step * CHUNKS + chunk) * WORDS
        tma.async_copy_global_to_shared(
            words_desc, [tile * BLOCK_N, at], ready.index(stage), words_smem.index(stage * CHUNKS + chunk)
        )
    if HAS_HIGH:
        tma.async_copy_global_to_shared(
            high_desc, [tile * BLOCK_N, step * WORDS], ready.index(stage), high_smem.index(stage)
        )


@gluon.jit
def _load_x(x_desc, x_smem, ready, step, stage, BOXES: gl.constexpr):
    for i in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(
            x_desc, [0, (step * BOXES + i) * BOX], ready.index(stage), x_smem.index(stage * BOXES + i)
        )


@gluon.jit
def _produce(
    x_desc, words_desc, high_desc, x_smem, words_smem, high_smem, ready, empty, first, last, num_steps,
    BITS: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load this program's steps: weights before the previous kernel has ended, x afterwards."""
    X_BYTES: gl.constexpr = BOXES * x_smem.shape[1] * BOX * 2
    for i in gl.static_range(STAGES):
        if first + i < last:
            tile, step = (first + i) // num_steps, (first + i) % num_steps
            _load_weights(words_desc, high_desc, words_smem, high_smem, ready, tile, step, i, X_BYTES, BITS)
    gdc_wait()
    for i in gl.static_range(STAGES):
        if first + i < last:
            _load_x(x_desc, x_smem, ready, (first + i) % num_steps, i, BOXES)
    stage = 0
    phase = 0
    for i in range(first + STAGES, last):
        mbarrier.wait(empty.index(stage), phase)
        tile, step = i // num_steps, i % num_steps
        _load_weights(words_desc, high_desc, words_smem, high_smem, ready, tile, step, stage, X_BYTES, BITS)
        _load_x(x_desc, x_smem, ready, step, stage, BOXES)
        phase = phase ^ (stage == STAGES - 1).to(gl.int32)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def _store(total, bias_ptr, out_ptr, tile, M, N, HAS_BIAS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    columns = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    rows = gl.arange(0, total.shape[1], gl.SliceLayout(0, LAYOUT))
    if HAS_BIAS:
        at = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, total.type.layout))
        total += gl.load(bias_ptr + at, mask=at < N, other=0.0).to(gl.float32)[:, None]
    y = gl.convert_layout(total.to(gl.bfloat16), LAYOUT)
    exists = (rows < M)[None, :] & (columns < N)[:, None]
    gl.store(out_ptr + rows[None, :] * N.to(gl.int64) + columns[:, None], y, mask=exists)


@gluon.jit
def _slot(program, share, begin):
    """Return the slot of a program's partial sums of the tile that starts at step `begin`; up to two each."""
    return 2 * program + (program * share <= begin).to(gl.int32)


@gluon.jit
def _finish(
    total, bias_ptr, partials_ptr, counters_ptr, out_ptr, tile, first, last, num_steps, share, M, N,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Store a tile whose steps `first` to `last` this program has, or leave a partial sum."""
    begin, end = tile * num_steps, (tile + 1) * num_steps
    if (first <= begin) & (last >= end):
        _store(total, bias_ptr, out_ptr, tile, M, N, HAS_BIAS)
    else:
        LAYOUT: gl.constexpr = total.type.layout
        BLOCK_M: gl.constexpr = total.shape[1]
        columns = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
        rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
        parts_at = partials_ptr + columns[:, None] * BLOCK_M + rows[None, :]
        gl.store(parts_at + _slot(first // share, share, begin) * (BLOCK_N * BLOCK_M), total)
        debug_barrier()  # all stores of the program precede its one release
        earliest, latest = begin // share, (end - 1) // share
        if gl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == latest - earliest:
            gl.store(counters_ptr + tile, 0)
            total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT)
            for program in range(earliest, latest + 1):
                at = parts_at + _slot(program, share, begin) * (BLOCK_N * BLOCK_M)
                total += gl.load(at, cache_modifier=".cg")
            _store(total, bias_ptr, out_ptr, tile, M, N, HAS_BIAS)


@gluon.jit
def _consume(
    pairs_ptr, bias_ptr, partials_ptr, counters_ptr, out_ptr, x_smem, words_smem, high_smem, ready, empty, first,
    last, share, M, N, num_steps,
    BITS: gl.constexpr, PAIR: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Multiply this program's steps, tile by tile."""
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    WORDS: gl.constexpr = words_of(BITS)
    CHUNKS: gl.constexpr = chunks_of(BITS)
    PARTS: gl.constexpr = parts_of(BITS)
    PAIRS: gl.constexpr = BOXES * BOX // PAIR
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, k_width=2)
    OF_PAIRS: gl.constexpr = scales_layout(BLOCK_N, PAIRS, gl.num_warps())
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, OF_PAIRS))
    places = gl.arange(0, PAIRS, gl.SliceLayout(0, OF_PAIRS))
    stage = 0
    phase = 0
    before = 0
    begin = first
    total = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS))
    while begin < last:
        tile = begin // num_steps
        first_step = begin - tile * num_steps
        end = gl.minimum(last - tile * num_steps, num_steps)
        row_at = pairs_ptr + gl.minimum(tile * BLOCK_N + rows, N - 1) * (num_steps * PAIRS)
        for at in range(first_step * PAIRS, end * PAIRS, LINE):
            prefetch(row_at + at, True)
        pairs_at = row_at[:, None] + places[None, :]
        pairs = gl.load(pairs_at + first_step * PAIRS)
        for step in range(first_step, end):
            mbarrier.wait(ready.index(stage), phase)
            following = gl.load(pairs_at + gl.minimum(step + 1, num_steps - 1) * PAIRS)
            for chunk in gl.static_range(CHUNKS):
                words = words_smem.index(stage * CHUNKS + chunk).load(WEIGHTS)
                high = words
                if high_bits_of(BITS) > 0:
                    high = high_smem.index(stage).load(WEIGHTS).to(gl.int16)
                for part in gl.static_range(chunk * PARTS, chunk * PARTS + PARTS):
                    pair = column_of(pairs, part * WORDS // PAIR, WEIGHTS)
                    weights = dequantize_part(words, high, pair, BITS, part, True)
                    box = x_smem.index(stage * BOXES + part * WORDS // BOX)
                    x = box.slice(part * WORDS % BOX, WORDS, dim=1).permute((1, 0))
                    # The first wgmma of a tile overwrites the accumulators: if they were zeroed instead, `ptxas`
                    # would wait.
                    adds = (step > first_step) if part == 0 else True
                    total = warpgroup_mma(weights, x, total, use_acc=adds, is_async=True)
                    total = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=[total]))
                    if part == 0:  # every wgmma of the previous step has ended
                        mbarrier.arrive(empty.index(before), count=1, pred=(begin > first) | (step > first_step))
            pairs = following
            before = stage
            phase = phase ^ (stage == STAGES - 1).to(gl.int32)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=[total])
        _finish(
            sums, bias_ptr, partials_ptr, counters_ptr, out_ptr, tile, first, last, num_steps, share, M, N, HAS_BIAS
        )
        total = warpgroup_mma_init(sums)
        begin = tile * num_steps + end


@gluon.jit(do_not_specialize=["M", "num_steps", "share"])
def stream_kernel(
    x_desc, words_desc, high_desc, pairs_ptr, bias_ptr, partials_ptr, counters_ptr, out_ptr, M, N, num_steps, share,
    BITS: gl.constexpr, PAIR: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """share: steps per program. PAIR: columns per pair."""
    CHUNKS: gl.constexpr = chunks_of(BITS)
    BOXES: gl.constexpr = CHUNKS * parts_of(BITS) * words_of(BITS) // BOX
    gdc_launch_dependents()
    num_all = gl.cdiv(N, BLOCK_N) * num_steps
    first = gl.program_id(0) * share
    last = gl.minimum(first + share, num_all)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * BOXES, x_desc.block_shape[0], BOX], x_desc.layout)
    words_smem = gl.allocate_shared_memory(gl.int16, [STAGES * CHUNKS, BLOCK_N, words_of(BITS)], words_desc.layout)
    high_smem = words_smem
    if high_bits_of(BITS) > 0:
        high_smem = gl.allocate_shared_memory(high_desc.dtype, [STAGES, BLOCK_N, words_of(BITS)], high_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    pairs_ptr, bias_ptr, partials_ptr, counters_ptr, out_ptr, x_smem, words_smem, high_smem, ready,
                    empty, first, last, share, M, N, num_steps, BITS, PAIR, BOXES, STAGES, HAS_BIAS,
                ),
            ),
            (
                _produce,
                (
                    x_desc, words_desc, high_desc, x_smem, words_smem, high_smem, ready, empty, first, last,
                    num_steps, BITS, BOXES, STAGES,
                ),
            ),
        ],
        [1], [PRODUCER_REGISTERS],
    )  # fmt: skip
