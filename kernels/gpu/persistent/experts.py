"""Choice of a token's experts from the router's logits, which every program makes for itself."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gpu.persistent.ll_protocol import receive
from kernels.gpu.persistent.ring import barrier
from kernels.gpu.persistent.stamps import stamp

THREADS = gl.constexpr(256)  # each has a logit; two or more have the same one
A_WORD = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
LOG2_E = gl.constexpr(1.4426950408889634)


@triton.constexpr_function
def ranks_layout(experts: int, columns: int) -> gl.BlockedLayout:
    """Return a layout of (experts, columns) with the same rows in a warp, 8 or 16, for any number of columns."""
    rows = experts // 8
    return gl.BlockedLayout([1, columns * rows // 32], [rows, 32 // rows], [8, 1], [1, 0])


@gluon.jit
def choose(router_ptr, flag, layer, logits, keys, experts, shares, is_chosen, stamps, SHAPE: gl.constexpr):
    """Store the token's experts, by falling logits, and their shares (chosen,); then arrive at `is_chosen`.

    Shared experts come first. In a dense layer the parts of its MLP are the experts. logits, keys: shared memory for
    THREADS numbers.
    """
    EXPERTS: gl.constexpr = SHAPE.value.experts
    CHOSEN: gl.constexpr = SHAPE.value.chosen
    SHARED: gl.constexpr = SHAPE.value.shared
    RANKS: gl.constexpr = ranks_layout(EXPERTS, EXPERTS)
    CHOICES: gl.constexpr = ranks_layout(EXPERTS, CHOSEN)
    word = gl.arange(0, THREADS, A_WORD) % EXPERTS
    logit = receive(router_ptr, word, flag, 1, True)
    stamp(stamps, "choose", SHAPE)
    logits.store(logit)
    keys.store(_order(logit, word, EXPERTS))
    keys = keys.slice(0, EXPERTS)
    one, others = keys.load(gl.SliceLayout(1, RANKS)), keys.load(gl.SliceLayout(0, RANKS))
    rank = gl.sum((others[None, :] > one[:, None]).to(gl.int32), axis=1)
    rank = gl.convert_layout(rank, gl.SliceLayout(1, CHOICES), assert_trivial=True)
    logit = logits.slice(0, EXPERTS).load(gl.SliceLayout(1, CHOICES))
    index = gl.arange(0, EXPERTS, gl.SliceLayout(1, CHOICES))
    place = gl.arange(0, CHOSEN, gl.SliceLayout(0, CHOICES))
    is_here = rank[:, None] == place[None, :] - SHARED
    # One reduction for both numbers, since reductions pass through shared memory.
    both = (index.to(gl.int64) << 32) | (logit.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF)
    both = gl.sum(gl.where(is_here, both[:, None], 0), axis=0)
    expert = (both >> 32).to(gl.int32)
    chosen = both.to(gl.int32).to(gl.float32, bitcast=True)
    is_shared = place < SHARED
    highest = gl.max(gl.where(is_shared, float("-inf"), chosen), axis=0)
    prob = gl.exp2((chosen - highest) * LOG2_E)
    if SHAPE.value.normalizes:
        total = gl.sum(gl.where(is_shared, 0.0, prob), axis=0)
    else:
        total = gl.sum(gl.exp2((logit - highest) * LOG2_E), axis=0)
    share = prob / total
    if SHARED:
        expert = gl.where(is_shared, EXPERTS + place, expert)
        share = gl.where(is_shared, 1.0, share)
    if SHAPE.value.dense_layers:
        is_dense = layer < SHAPE.value.dense_layers
        expert = gl.where(is_dense, place, expert)
        share = gl.where(is_dense, 1.0, share)
    experts.store(expert)
    shares.store(share)
    barrier()  # every thread has stored
    mbarrier.arrive(is_chosen.index(0), count=1)


@gluon.jit
def _order(logit, expert, EXPERTS: gl.constexpr):
    """Map logits to integers in their order, with 16 or 17 bits of mantissa; the first of equal experts wins."""
    bits = logit.to(gl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -EXPERTS) | (EXPERTS - 1 - expert)


@gluon.jit
def shares_of(tiles, shares, SHAPE: gl.constexpr):
    """Return the share of each tile's expert, in the layout of `tiles` (tiles,)."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, SHAPE.value.chosen], [32, 1], [8, 1], [1, 0]))
    place = gl.arange(0, SHAPE.value.chosen, layout)
    of_tile: gl.constexpr = gl.SliceLayout(1, layout.parent)
    rank = gl.convert_layout(tiles // (SHAPE.value.intermediate // 8), of_tile)
    found = gl.sum(gl.where(rank[:, None] == place[None, :], shares.load(layout)[None, :], 0.0), axis=1)
    return gl.convert_layout(found, tiles.type.layout)
