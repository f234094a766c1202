"""Choice of a token's experts from the router's logits, by every program for itself."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gpu.persistent.ll_protocol import VECTOR, receive
from kernels.gpu.persistent.stamps import stamp
from kernels.gpu.persistent.stream import barrier

EXPERTS = gl.constexpr(128)
RANKS = gl.constexpr(gl.BlockedLayout([1, 64], [16, 2], [8, 1], [1, 0]))  # (EXPERTS, EXPERTS)
CHOICES = gl.constexpr(gl.BlockedLayout([16, 2], [8, 4], [1, 8], [1, 0]))  # (EXPERTS, chosen), all of it in each warp
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def choose(router_ptr, flag, logits, experts, shares, is_chosen, stamps, SHAPE: gl.constexpr):
    """Put the token's experts, by falling logits, and their shares (chosen,) into shared memory; arrive there.

    logits: shared memory for it.
    """
    logits.store(receive(router_ptr + gl.arange(0, EXPERTS, VECTOR), flag, EXPERTS // 32))
    stamp(stamps, 13, SHAPE)
    one, others = logits.load(gl.SliceLayout(1, RANKS))[:, None], logits.load(gl.SliceLayout(0, RANKS))[None, :]
    index = gl.arange(0, EXPERTS, gl.SliceLayout(1, RANKS))[:, None]
    before = gl.arange(0, EXPERTS, gl.SliceLayout(0, RANKS))[None, :] < index
    is_ahead = (others > one) | ((others == one) & before)
    rank = gl.convert_layout(gl.sum(is_ahead.to(gl.int32), axis=1), gl.SliceLayout(1, CHOICES))
    logit = logits.load(gl.SliceLayout(1, CHOICES))
    prob = gl.exp2((logit - gl.max(logit, axis=0)) * LOG2_E)
    place = gl.arange(0, SHAPE.value.chosen, gl.SliceLayout(0, CHOICES))
    index = gl.arange(0, EXPERTS, gl.SliceLayout(1, CHOICES))
    is_here = rank[:, None] == place[None, :]
    experts.store(gl.sum(gl.where(is_here, index[:, None], 0), axis=0))
    share = gl.sum(gl.where(is_here, prob[:, None], 0.0), axis=0)
    shares.store(share / gl.sum(share if SHAPE.value.normalizes else prob, axis=0))
    barrier()  # every thread has stored
    mbarrier.arrive(is_chosen.index(0), count=1)


@gluon.jit
def shares_of(tiles, shares, SHAPE: gl.constexpr):
    """The share of each tile's expert, like the tiles' numbers (tiles,)."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, SHAPE.value.chosen], [32, 1], [8, 1], [1, 0]))
    place = gl.arange(0, SHAPE.value.chosen, layout)
    of_tile: gl.constexpr = gl.SliceLayout(1, layout.parent)
    rank = gl.convert_layout(tiles // (SHAPE.value.intermediate // 8), of_tile)
    found = gl.sum(gl.where(rank[:, None] == place[None, :], shares.load(layout)[None, :], 0.0), axis=1)
    return gl.convert_layout(found, tiles.type.layout)
