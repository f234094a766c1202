"""The kernel of `packed_experts`, in Gluon: producer warps load weights by TMA and gather x, consumer warps multiply.

A program multiplies a tile: up to BLOCK_M pairs of an expert, and BLOCK_N of its rows of W. While the tensor cores
multiply one part of a K step, the next part is dequantized; Triton would wait for a wgmma with an operand in
registers. With a gate, a tile alternates 8 rows of W_gate and the same 8 of W_up. A thread holds rows of a wgmma's
operand that are 8 apart, so it gets both products of an output.

Layout of weights: `kernels/quantization/w4a16_gemm.py`, `kernels/quantization/mxfp4.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.moe.activation import clamped_times
from kernels.gpu.moe.grouped_gemm import weighted_places
from kernels.gpu.quantization.packed_parts import dequantize_part
from kernels.gpu.quantization.row_scales import column_of, scales_layout
from kernels.quantization.mxfp4 import SHIFTS

STEP = gl.constexpr(128)  # columns of a K step: one chunk
WORDS = gl.constexpr(32)  # per row of W and step
BOX = gl.constexpr(64)  # columns of x in 128 bytes of shared memory
TURN = gl.constexpr(8)  # alternating rows of W_gate and of W_up
PRODUCERS = gl.constexpr(4)  # warps


@triton.constexpr_function
def box_of(rows: int, is_gated: bool) -> list[int]:
    """Return the shape of a TMA load: (experts, rows, words), or (experts, turns, gate and up, TURN, words)."""
    return [1, rows // (2 * TURN.value), 2, TURN.value, WORDS.value] if is_gated else [1, rows, WORDS.value]


@triton.constexpr_function
def stages_of_boxes(rows: int, is_gated: bool, num_stages: int) -> list[int]:
    return [num_stages, *box_of(rows, is_gated)]


@triton.constexpr_function
def dequantizing_e2m1(part: int) -> str:
    """Return assembly that multiplies two e2m1 in words $1 by two bfloat16 2^(e - 1), $2.

    The bits of q, placed in a bfloat16, are q 2^-126.
    """
    sign, others = SHIFTS[part]
    lines = [".reg .b32 s, t;", f"shr.b32 t, $1, {others - 6};" if others >= 6 else f"shl.b32 t, $1, {6 - others};"]
    lines += ["and.b32 t, t, 0x01C001C0;", f"shl.b32 s, $1, {15 - sign};", "lop3.b32 t, s, 0x80008000, t, 0xEA;"]
    return "{\n" + "\n".join([*lines, "mul.rn.bf16x2 $0, t, $2;"]) + "\n}"


@triton.constexpr_function
def producer_registers(block_m: int) -> int:
    """Return a producer's registers, more for large tiles with more pointers to x; consumers get the rest."""
    return 24 if block_m <= 64 else 48


@gluon.jit
def _tile_of(counts_ptr, tile, NUM_EXPERTS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return a tile's (expert, place of its first pair, number of pairs); no pairs after the last tile."""
    EXPERTS: gl.constexpr = max(32, triton.next_power_of_2(NUM_EXPERTS))
    LAYOUT: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [gl.num_warps()], [0])  # every warp holds all
    experts = gl.arange(0, EXPERTS, LAYOUT)
    counts = gl.load(counts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    is_it = (ends > tile) & (ends - tiles <= tile)
    done = gl.sum(gl.where(is_it, tile - ends + tiles, 0)) * BLOCK_M
    first = gl.sum(gl.where(ends <= tile, counts, 0)) + done
    return gl.sum(gl.where(is_it, experts, 0)), first, gl.minimum(gl.sum(gl.where(is_it, counts, 0)) - done, BLOCK_M)


@gluon.jit
def _column_of(rows, block, GATED: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the output columns of a tile's rows of W."""
    if GATED:
        columns = block * (BLOCK_N // 2) + rows // (2 * TURN) * TURN + rows % TURN
    else:
        columns = block * BLOCK_N + rows
    return columns


@gluon.jit
def _row_of(rows, columns, expert, N, GATED: gl.constexpr):
    """Return the rows in all experts' W of a tile's rows, for these output columns."""
    if GATED:
        of_weight = (expert * 2 + rows // TURN % 2) * N + columns
    else:
        of_weight = expert * N + columns
    return of_weight


@gluon.jit
def _produce(
    x_ptr, words_desc, order_ptr, x_smem, words_smem, ready, empty, expert, first, count, block, x_stride, num_steps,
    X_COLUMNS: gl.constexpr, TOP_K: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load a tile's steps. A stage is `ready` once its weights and every thread's part of x have arrived."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [PRODUCERS, 1], [1, 0])
    rows = gl.arange(0, x_smem.shape[1], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BOX, gl.SliceLayout(0, LAYOUT))
    exists = rows < count
    x_rows = gl.load(order_ptr + first + rows, mask=exists, other=0) // (TOP_K if GATED else 1)
    x_at = (x_ptr + x_rows.to(gl.int64) * x_stride)[:, None] + columns[None, :]
    stage = 0
    phase = 1
    for step in range(num_steps):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready.index(stage), BLOCK_N * WORDS * 2)
        if GATED:
            box = [expert, block * (BLOCK_N // (2 * TURN)), 0, 0, step * WORDS]
        else:
            box = [expert, block * BLOCK_N, step * WORDS]
        tma.async_copy_global_to_shared(words_desc, box, ready.index(stage), words_smem.index(stage))
        for i in gl.static_range(STEP // BOX):
            at = step * STEP + i * BOX
            mask = exists[:, None] & (at + columns < X_COLUMNS)[None, :]
            async_copy.async_copy_global_to_shared(x_smem.index(stage * (STEP // BOX) + i), x_at + at, mask=mask)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
        phase = phase ^ (stage == STAGES - 1).to(gl.int32)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def _dequantize(words, scales, FORMAT: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr):
    """Return the weights of part PART of a step as bfloat16, (BLOCK_N, WORDS)."""
    LAYOUT: gl.constexpr = words.type.layout
    if FORMAT == "e2m1":
        exponents = column_of(scales, 0, LAYOUT) >> 8 * PART & 255
        power = exponents * 0x800080 + 0x3F003F00  # two copies of 2^(e - 1)
        weights = gl.inline_asm_elementwise(
            dequantizing_e2m1(PART), "=r,r,r,r", [words, power], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        pair = column_of(scales, PART * WORDS // GROUP, LAYOUT)
        weights = dequantize_part(words, words, pair, 4, PART, True)
    return weights


@gluon.jit
def _consume(
    scales_ptr, bias_ptr, order_ptr, shares_ptr, out_ptr, x_smem, words_smem, ready, empty, expert, first, count,
    block, num_tokens, N, num_steps,
    FORMAT: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply a tile and store it."""
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    BLOCK_N: gl.constexpr = words_smem.shape[1]
    COLUMNS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    BOXES: gl.constexpr = STEP // BOX
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, k_width=2)
    SCALES: gl.constexpr = 1 if FORMAT == "e2m1" else STEP // GROUP  # words per row and step
    OF_SCALES: gl.constexpr = scales_layout(BLOCK_N, SCALES, gl.num_warps())
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, OF_SCALES))
    columns = _column_of(rows, block, GATED, BLOCK_N)
    inside = (columns < N)[:, None]
    scales_at = scales_ptr + (_row_of(rows, columns, expert, N, GATED).to(gl.int64) * (num_steps * SCALES))[:, None]
    scales_at += gl.arange(0, SCALES, gl.SliceLayout(0, OF_SCALES))[None, :]
    total = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS))
    stage = 0
    phase = 0
    before = 0
    begin = 0
    # A loop of one iteration: with zeroed sums right before the loop over steps, `ptxas` would wait for each wgmma.
    while begin < num_steps:
        scales = gl.load(scales_at, mask=inside, other=0)
        for step in range(num_steps):
            mbarrier.wait(ready.index(stage), phase)
            fence_async_shared()  # x is not written by TMA
            words = words_smem.index(stage).load(WEIGHTS)
            following = gl.load(scales_at + gl.minimum(step + 1, num_steps - 1) * SCALES, mask=inside, other=0)
            for part in gl.static_range(STEP // WORDS):
                weights = _dequantize(words, scales, FORMAT, GROUP, part)
                box = x_smem.index(stage * BOXES + part * WORDS // BOX)
                x = box.slice(part * WORDS % BOX, WORDS, dim=1).permute((1, 0))
                adds = (step > 0) if part == 0 else True
                total = warpgroup_mma(weights, x, total, use_acc=adds, is_async=True)
                total = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=[total]))
                if part == 0:  # every wgmma of the previous step has ended
                    mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
            scales = following
            before = stage
            phase = phase ^ (stage == STAGES - 1).to(gl.int32)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        total = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=0, deps=[total]))
        begin = num_steps
    sums = warpgroup_mma_wait(num_outstanding=0, deps=[total])
    if HAS_BIAS:
        rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
        columns = _column_of(rows, block, GATED, BLOCK_N)
        bias_at = bias_ptr + _row_of(rows, columns, expert, N, GATED)
        sums += gl.load(bias_at, mask=columns < N, other=0.0).to(gl.float32)[:, None]
    places = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUMS))
    exists = places < count
    pairs = gl.load(order_ptr + first + places, mask=exists, other=0)
    if GATED:
        gate, up = sums.reshape([BLOCK_N // (2 * TURN), 2, TURN, BLOCK_M]).permute((0, 2, 3, 1)).split()
        y = clamped_times(gate, up, ALPHA, LIMIT).reshape([COLUMNS, BLOCK_M])
    else:
        pairs, shares = weighted_places(pairs, shares_ptr, exists, num_tokens, TOP_K)
        y = sums * shares[None, :]
    THREADS: gl.constexpr = min(COLUMNS // 8, 32)
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [THREADS, 32 // THREADS], [1, gl.num_warps()], [0, 1])
    y = gl.convert_layout(y.to(gl.bfloat16), STORED)
    pairs = gl.convert_layout(gl.where(exists, pairs, -1), gl.SliceLayout(0, STORED))
    columns = block * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, STORED))
    at = out_ptr + pairs.to(gl.int64)[None, :] * N + columns[:, None]
    gl.store(at, y, mask=(pairs >= 0)[None, :] & (columns < N)[:, None])


@gluon.jit(do_not_specialize=["num_tokens", "num_steps"])
def experts_kernel(
    x_ptr, words_desc, scales_ptr, bias_ptr, order_ptr, counts_ptr, shares_ptr, out_ptr, num_tokens, N, num_steps,
    x_stride,
    NUM_EXPERTS: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, X_COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """X_COLUMNS: of x, which may have fewer than num_steps K steps. BLOCK_N: rows of W per tile."""
    gdc_launch_dependents()
    gdc_wait()
    block = gl.program_id(0)
    expert, first, count = _tile_of(counts_ptr, gl.program_id(1), NUM_EXPERTS, BLOCK_M)
    if count <= 0:
        return
    BOXES: gl.constexpr = STAGES * (STEP // BOX)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [BOXES, BLOCK_M, BOX], gl.NVMMASharedLayout(128, 16, rank=2))
    words_smem = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, WORDS], gl.NVMMASharedLayout(64, 16, rank=2))
    boxes = words_smem._reinterpret(gl.int16, stages_of_boxes(BLOCK_N, GATED, STAGES), words_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1 + 32 * PRODUCERS)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    scales_ptr, bias_ptr, order_ptr, shares_ptr, out_ptr, x_smem, words_smem, ready, empty, expert,
                    first, count, block, num_tokens, N, num_steps, FORMAT, GROUP, TOP_K, GATED, HAS_BIAS, ALPHA,
                    LIMIT, STAGES,
                ),
            ),
            (
                _produce,
                (
                    x_ptr, words_desc, order_ptr, x_smem, boxes, ready, empty, expert, first, count, block, x_stride,
                    num_steps, X_COLUMNS, TOP_K, GATED, BLOCK_N, STAGES,
                ),
            ),
        ],
        [PRODUCERS], [producer_registers(BLOCK_M)],
    )  # fmt: skip
