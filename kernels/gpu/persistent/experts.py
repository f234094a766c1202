"""Choice of a token's experts from the router's logits, by every program for itself."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gpu.persistent.ll_protocol import receive
from kernels.gpu.persistent.ring import barrier
from kernels.gpu.persistent.stamps import stamp

EXPERTS = gl.constexpr(128)
TWICE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
RANKS = gl.constexpr(gl.BlockedLayout([1, 64], [16, 2], [8, 1], [1, 0]))  # (EXPERTS, EXPERTS)
CHOICES = gl.constexpr(gl.BlockedLayout([1, 4], [16, 2], [8, 1], [1, 0]))  # (EXPERTS, chosen), with the same rows
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def choose(router_ptr, flag, logits, keys, experts, shares, is_chosen, stamps, SHAPE: gl.constexpr):
    """Put the token's experts, by falling logits, and their shares (chosen,) into shared memory; arrive there.

    logits, keys: shared memory for twice as many.
    """
    word = gl.arange(0, 2 * EXPERTS, TWICE)
    logit = receive(router_ptr, word % EXPERTS, flag, 1, True)
    stamp(stamps, "choose", SHAPE)
    logits.store(logit)
    keys.store(_order(logit, word % EXPERTS))
    keys = keys.slice(0, EXPERTS)
    one, others = keys.load(gl.SliceLayout(1, RANKS)), keys.load(gl.SliceLayout(0, RANKS))
    rank = gl.sum((others[None, :] > one[:, None]).to(gl.int32), axis=1)
    rank = gl.convert_layout(rank, gl.SliceLayout(1, CHOICES), assert_trivial=True)
    logit = logits.slice(0, EXPERTS).load(gl.SliceLayout(1, CHOICES))
    index = gl.arange(0, EXPERTS, gl.SliceLayout(1, CHOICES))
    place = gl.arange(0, SHAPE.value.chosen, gl.SliceLayout(0, CHOICES))
    is_here = rank[:, None] == place[None, :]
    # One reduction for two numbers: it passes through shared memory.
    both = (index.to(gl.int64) << 32) | (logit.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF)
    both = gl.sum(gl.where(is_here, both[:, None], 0), axis=0)
    experts.store((both >> 32).to(gl.int32))
    chosen = both.to(gl.int32).to(gl.float32, bitcast=True)
    highest = gl.max(chosen, axis=0)
    prob = gl.exp2((chosen - highest) * LOG2_E)
    if SHAPE.value.normalizes:
        total = gl.sum(prob, axis=0)
    else:
        total = gl.sum(gl.exp2((logit - highest) * LOG2_E), axis=0)
    shares.store(prob / total)
    barrier()  # every thread has stored
    mbarrier.arrive(is_chosen.index(0), count=1)


@gluon.jit
def _order(logit, expert):
    """Integers in the order of logits, cut off after 16 bits of mantissa; of equal ones the first expert is ahead."""
    bits = logit.to(gl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -EXPERTS) | (EXPERTS - 1 - expert)


@gluon.jit
def shares_of(tiles, shares, SHAPE: gl.constexpr):
    """The share of each tile's expert, like the tiles' numbers (tiles,)."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, SHAPE.value.chosen], [32, 1], [8, 1], [1, 0]))
    place = gl.arange(0, SHAPE.value.chosen, layout)
    of_tile: gl.constexpr = gl.SliceLayout(1, layout.parent)
    rank = gl.convert_layout(tiles // (SHAPE.value.intermediate // 8), of_tile)
    found = gl.sum(gl.where(rank[:, None] == place[None, :], shares.load(layout)[None, :], 0.0), axis=1)
    return gl.convert_layout(found, tiles.type.layout)
