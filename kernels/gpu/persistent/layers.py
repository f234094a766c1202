"""The kernel: consumer warps compute all layers of a decoder for one row from data that producer warps load.

    y = W_o attend(rotate(norm(W_qkv norm(x)))) + x,  x = W_down (silu(W_gate norm(y)) * W_up norm(y)) + y

or the sum of such MLPs over a token's experts, from the token's row of the embedding to the final norm.

Programs, one per multiprocessor, have tiles of 8 rows of each W. They wait for each other by polling words
(`ll_protocol.py`), so all must run at once: the launch is cooperative.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gpu.persistent.attention.grouped import attend, head_factors
from kernels.gpu.persistent.attention.latent import attend_latents
from kernels.gpu.persistent.experts import LOG2_E, THREADS, choose, shares_of
from kernels.gpu.persistent.gemv import allocate_sums, gemv, sum_slices, tile_numbers, tile_rows
from kernels.gpu.persistent.ll_protocol import flagged, load_vector, receive_vector, store_vector
from kernels.gpu.persistent.long_rows import by_pieces, gemv_by_pieces
from kernels.gpu.persistent.operand import (
    FLAT,
    allocate_operand,
    inverse_root,
    receive_operand,
    store_operand,
    store_squares,
)
from kernels.gpu.persistent.ring import (
    DIMS,
    PRODUCERS,
    SLICES,
    WEIGHTS_SHARED,
    prefetch,
    release,
    shape_of,
    weight_slots,
)
from kernels.gpu.persistent.scales import biases_of, down_scales, gate_up_scales, row_biases, row_scales, scales_of
from kernels.gpu.persistent.stamps import NUM_STAMPS, stamp
from kernels.gpu.persistent.stream import ADDRESSES, DOWN, GATE_UP, OUTPUT, QKV, produce


@gluon.jit
def _ask_for_norms(norms_ptr, layer, SHAPE: gl.constexpr):
    """Prefetch the layer's norms into the L2 cache, a line per program."""
    at = norms_ptr + layer * SHAPE.value.norms + gl.program_id(0) * 64
    if gl.program_id(0) * 64 < SHAPE.value.norms:
        prefetch(at)


@gluon.jit
def _project(
    in_ptr, residual_ptr, out_ptr, K: gl.constexpr, flag, operand, scale, scales, smem, ready, empty, sums, slot,
    phase, stamps, STAGE: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Multiply W (hidden, K) by a vector from other programs and add the program's rows of the residual.

    scale: of the program's rows. scales: see `gemv`.
    """
    H: gl.constexpr = SHAPE.value.hidden
    rows, exist = tile_rows(H, SHAPE)
    before = gl.load(residual_ptr + rows, mask=exist, other=0).to(gl.float32, bitcast=True)
    if by_pieces(SHAPE, K):
        stamp(stamps, STAGE, SHAPE)
        slot, phase, count = gemv_by_pieces(H, K, in_ptr, flag, operand, smem, ready, empty, sums, slot, phase, SHAPE)
    else:
        receive_operand(in_ptr, flag, K, operand)
        stamp(stamps, STAGE, SHAPE)
        slot, phase, count = gemv(H, K, False, operand, scales, smem, ready, empty, sums, slot, phase, SHAPE)
    gl.store(out_ptr + rows, flagged(sum_slices(sums, False, SHAPE) * scale + before, flag), mask=exist)
    release(empty, slot, count, SHAPE.value.slots)
    return slot, phase


@gluon.jit
def _route(
    router_ptr, flag, layer, operand, squares, eps, smem, ready, empty, sums, slot, phase, logits, keys, experts,
    shares, is_chosen, stamps, SHAPE: gl.constexpr,
):  # fmt: skip
    """Compute the program's rows of the router's logits, if it has any, and choose the token's experts."""
    EXPERTS: gl.constexpr = SHAPE.value.experts
    H: gl.constexpr = SHAPE.value.hidden
    if gl.program_id(0) < EXPERTS // 8:
        slot, phase, count = gemv(EXPERTS, H, False, operand, (), smem, ready, empty, sums, slot, phase, SHAPE)
        y = sum_slices(sums, False, SHAPE) * inverse_root(squares, eps, H)
        rows, exist = tile_rows(EXPERTS, SHAPE)
        gl.store(router_ptr + rows, flagged(y, flag), mask=exist)
        release(empty, slot, count, SHAPE.value.slots)
    stamp(stamps, "receive logits", SHAPE)
    choose(router_ptr, flag, layer, logits, keys, experts, shares, is_chosen, stamps, SHAPE)
    return slot, phase


@gluon.jit
def _gate_up(
    gated_ptr, scales_ptr, flag, operand, squares, eps, ring, ready, empty, sums, slot, phase, experts, shares,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """Store the program's rows of silu(W_gate x) * W_up x, with experts multiplied by their shares."""
    H: gl.constexpr = SHAPE.value.hidden
    INNER: gl.constexpr = SHAPE.value.inner
    gate_scale, up_scale = gate_up_scales(scales_ptr, experts, SHAPE)
    slot, phase, count = gemv(INNER, H, True, operand, (), ring, ready, empty, sums, slot, phase, SHAPE)
    root = inverse_root(squares, eps, H)
    gate = sum_slices(sums, False, SHAPE) * root * gate_scale
    up = sum_slices(sums, True, SHAPE) * root * up_scale
    gated = gate / (1.0 + gl.exp2(gate * -LOG2_E)) * up
    rows, exist = tile_rows(INNER, SHAPE)
    if SHAPE.value.experts:
        gated *= shares_of(tile_numbers(SHAPE), shares, SHAPE)[:, None]
    gl.store(gated_ptr + rows, flagged(gated, flag), mask=exist)
    release(empty, slot, count, SHAPE.value.slots)
    return slot, phase


@gluon.jit
def _consume(
    weights_ptr, norms_ptr, final_norm_ptr, embedding_ptr, pool_ptr, rotation_ptr, hidden_ptr, words, stamps_ptr,
    smem, ready, empty, experts, is_chosen, num_layers, num_keys, kv_slot, eps, scale, layer_stride, block_stride,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """embedding_ptr, rotation_ptr: rows of the token and of its position. hidden_ptr: bfloat16 (hidden,), output."""
    x_ptr, y_ptr, qkv_ptr, absorbed_ptr, partial_ptr, latent_ptr, attended_ptr, router_ptr, gated_ptr, epoch_ptr = (
        words
    )
    H: gl.constexpr = SHAPE.value.hidden
    PADDED: gl.constexpr = triton.next_power_of_2(H)
    QKV_ROWS: gl.constexpr = SHAPE.value.qkv
    ATTENDED: gl.constexpr = SHAPE.value.attended
    EXPERTS: gl.constexpr = SHAPE.value.experts
    INNER: gl.constexpr = SHAPE.value.inner
    NORMS: gl.constexpr = SHAPE.value.norms
    SLOTS: gl.constexpr = SHAPE.value.slots
    squares = gl.allocate_shared_memory(gl.float32, [SLICES], FLAT)
    logits = gl.allocate_shared_memory(gl.float32, [THREADS if EXPERTS else 1], FLAT)
    keys = gl.allocate_shared_memory(gl.int32, [THREADS if EXPERTS else 1], FLAT)
    shares = gl.allocate_shared_memory(gl.float32, [SHAPE.value.chosen], FLAT)
    program = gl.program_id(0)
    hidden_rows, has_hidden = tile_rows(H, SHAPE)
    ring = weight_slots(smem, SHAPE)
    epoch = gl.load(epoch_ptr)
    norm = load_vector(norms_ptr, H)
    if program < H // 8:  # the residual of the first layer; x is read from the embedding by each program
        own = gl.load(embedding_ptr + hidden_rows, mask=has_hidden, other=0.0).to(gl.float32)
        gl.store(x_ptr + hidden_rows, flagged(own, epoch & 1), mask=has_hidden)
    of_qkv, of_bias = scales_of(weights_ptr, QKV, SHAPE), biases_of(weights_ptr, SHAPE)
    slot = 0
    phase = 0
    for layer in range(num_layers):
        flag = (epoch + layer + 1) & 1
        next_layer = gl.minimum(layer + 1, num_layers - 1)
        stamps = stamps_ptr + (layer * SHAPE.value.programs + program) * NUM_STAMPS
        addresses = weights_ptr + layer * ADDRESSES
        qkv_scale, qkv_bias = row_scales(of_qkv, QKV_ROWS, SHAPE), row_biases(of_bias, QKV_ROWS, SHAPE)
        of_output = scales_of(addresses, OUTPUT, SHAPE)
        _ask_for_norms(norms_ptr, next_layer, SHAPE)
        stamp(stamps, "receive x", SHAPE)
        if layer == 0:
            x = load_vector(embedding_ptr, H)
        else:
            x = receive_vector(x_ptr, flag ^ 1, H, PADDED)
        stamp(stamps, "qkv", SHAPE)
        operand, sums = allocate_operand(SHAPE), allocate_sums(SHAPE)  # attention reuses their memory
        store_operand(x * norm, 0, operand)
        store_squares(x, squares)
        slot, phase, count = gemv(QKV_ROWS, H, False, operand, (), ring, ready, empty, sums, slot, phase, SHAPE)
        y = sum_slices(sums, False, SHAPE) * inverse_root(squares, eps, H) * qkv_scale + qkv_bias
        rows, exist = tile_rows(QKV_ROWS, SHAPE)
        gl.store(qkv_ptr + rows, flagged(y, flag), mask=exist)
        release(empty, slot, count, SLOTS)
        stamp(stamps, "receive heads", SHAPE)
        of_layer = pool_ptr + layer.to(gl.int64) * layer_stride  # type: ignore[attr-defined]
        head_norms = norms_ptr + layer * NORMS + 2 * H
        if SHAPE.value.is_latent:
            slot, phase = attend_latents(
                qkv_ptr, absorbed_ptr, partial_ptr, latent_ptr, attended_ptr, of_layer, head_norms, rotation_ptr,
                stamps, smem, ready, empty, slot, phase, flag, num_keys, kv_slot, eps, scale, block_stride, SHAPE,
            )  # fmt: skip
        else:
            factors = head_factors(head_norms, rotation_ptr, SHAPE)
            if program < SHAPE.value.kv_heads * SHAPE.value.splits:
                slot, phase = attend(
                    qkv_ptr, partial_ptr, attended_ptr, of_layer, factors, stamps, smem, ready, empty, slot, phase,
                    flag, num_keys, kv_slot, eps, scale, block_stride, SHAPE,
                )  # fmt: skip
        stamp(stamps, "receive attended", SHAPE)
        operand, sums = allocate_operand(SHAPE), allocate_sums(SHAPE)
        if program < H // 8:
            slot, phase = _project(
                attended_ptr, x_ptr, y_ptr, ATTENDED, flag, operand, row_scales(of_output, H, SHAPE), (),
                ring, ready, empty, sums, slot, phase, stamps, "output", SHAPE,
            )  # fmt: skip
        norm = load_vector(norms_ptr + layer * NORMS + H, H)
        of_gate_up, of_down = scales_of(addresses, GATE_UP, SHAPE), scales_of(addresses, DOWN, SHAPE)
        stamp(stamps, "receive y", SHAPE)
        x = receive_vector(y_ptr, flag, H, PADDED)
        stamp(stamps, "router", SHAPE)
        store_operand(x * norm, 0, operand)
        store_squares(x, squares)
        if EXPERTS:
            slot, phase = _route(
                router_ptr, flag, layer, operand, squares, eps, smem, ready, empty, sums, slot, phase, logits, keys,
                experts, shares, is_chosen, stamps, SHAPE,
            )  # fmt: skip
        stamp(stamps, "gate_up", SHAPE)
        slot, phase = _gate_up(
            gated_ptr, of_gate_up, flag, operand, squares, eps, ring, ready, empty, sums, slot, phase, experts,
            shares, SHAPE,
        )  # fmt: skip
        stamp(stamps, "receive gated", SHAPE)
        of_next = weights_ptr + next_layer * ADDRESSES
        of_qkv, of_bias = scales_of(of_next, QKV, SHAPE), biases_of(of_next, SHAPE)
        if program < H // 8:
            scales = down_scales(of_down, experts, ring, SHAPE)
            of_rows = 1.0 if EXPERTS else row_scales(of_down, H, SHAPE)
            slot, phase = _project(
                gated_ptr, y_ptr, x_ptr, INNER, flag, operand, of_rows, scales, ring, ready, empty, sums, slot,
                phase, stamps, "down", SHAPE,
            )  # fmt: skip
        norm = load_vector(norms_ptr + next_layer * NORMS, H)
        stamp(stamps, "end", SHAPE)
    if program == 0:
        x = receive_vector(x_ptr, (epoch + num_layers) & 1, H, PADDED)
        store_squares(x, squares)
        normed = x * load_vector(final_norm_ptr, H) * inverse_root(squares, eps, H)
        store_vector(hidden_ptr, normed, H)
        gl.store(epoch_ptr, epoch + num_layers)  # all programs have read it, since x depends on words of each


@gluon.jit(  # the inputs are a row of the batch's, of any alignment, and compiling takes seconds
    do_not_specialize=["num_layers"],
    do_not_specialize_on_alignment=["token_ptr", "position_ptr", "length_ptr", "slot_ptr", "table_ptr"],
)
def decoder_kernel(
    weights_ptr, norms_ptr, final_norm_ptr, embedding_ptr, rotary_ptr, pool_ptr, token_ptr, position_ptr, length_ptr,
    slot_ptr, table_ptr, hidden_ptr, x_ptr, y_ptr, qkv_ptr, absorbed_ptr, partial_ptr, latent_ptr, attended_ptr,
    router_ptr, gated_ptr, epoch_ptr, stamps_ptr, num_layers, eps, scale, layer_stride, block_stride,
    TEXT: gl.constexpr,
):  # fmt: skip
    """Compute one step of one row, see `PersistentDecoder`. TEXT: `Shape.text`.

    weights_ptr: int64 (layers, NUM_ADDRESSES), addresses. norms_ptr: (layers, norms). x_ptr to gated_ptr: words, see
    ll_protocol.py. epoch_ptr: int32, layers computed so far. scale: of scores, times log2(e).
    """
    SHAPE: gl.constexpr = shape_of(TEXT)
    SLOTS: gl.constexpr = SHAPE.value.slots
    smem = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, SLICES, 8, DIMS], WEIGHTS_SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=32 * PRODUCERS)
        mbarrier.init(empty.index(i), count=1)
    experts = gl.allocate_shared_memory(gl.int32, [SHAPE.value.chosen], FLAT)
    is_chosen = ready
    if SHAPE.value.experts:  # if unused, its bytes would get other data, which a context switch would overwrite
        is_chosen = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(is_chosen.index(0), count=1)
    num_keys = gl.maximum(gl.load(length_ptr), 1)  # an unused row attends to its own key
    token = gl.maximum(gl.load(token_ptr), 0)
    of_token = embedding_ptr + token * SHAPE.value.hidden
    rotation = rotary_ptr + gl.load(position_ptr).to(gl.int64) * (2 * SHAPE.value.rotated)
    kv_slot = gl.load(slot_ptr)
    words = (
        x_ptr,
        y_ptr,
        qkv_ptr,
        absorbed_ptr,
        partial_ptr,
        latent_ptr,
        attended_ptr,
        router_ptr,
        gated_ptr,
        epoch_ptr,
    )
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    weights_ptr, norms_ptr, final_norm_ptr, of_token, pool_ptr, rotation, hidden_ptr, words,
                    stamps_ptr, smem, ready, empty, experts, is_chosen, num_layers, num_keys, kv_slot, eps, scale,
                    layer_stride, block_stride, SHAPE,
                ),
            ),
            (
                produce,
                (
                    weights_ptr, pool_ptr, table_ptr, smem, ready, empty, experts, is_chosen, num_layers, num_keys,
                    layer_stride, block_stride, SHAPE,
                ),
            ),
        ],
        [PRODUCERS], [56],
    )  # fmt: skip
