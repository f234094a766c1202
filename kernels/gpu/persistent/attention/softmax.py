"""Online softmax of a program's query heads over tiles of keys, with operands for tensor cores.

The operand has 16 rows: the heads of a group, up to 8, rounded to bfloat16, and the remainders.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gpu.persistent.gemv import FLAT3
from kernels.gpu.persistent.operand import split_bfloat16
from kernels.gpu.persistent.ring import DIMS, KEYS

HEADS = gl.constexpr(8)  # at most, in a group
NONE = gl.constexpr(-1e30)  # the score where there is no key
TILES = gl.constexpr(gl.BlockedLayout([1, 1, 2], [1, 1, 32], [1, 8, 1], [2, 1, 0]))  # (tiles, heads, keys)
OF_HEAD = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, TILES)))
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8]))  # (heads twice, keys or DIMS)
PROBS = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 2))
HALVES_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [3, 2, 1, 0]))  # (tiles, halves, heads, keys)
VALUES = gl.constexpr(gl.DotOperandLayout(1, PRODUCT, 2))


@gluon.jit
def new_probs(scores, row_max, row_sum, probs, TILES_NOW: gl.constexpr):
    """Store probabilities of more keys in `probs`, each as two bfloat16; return the maximum, the sum, and a factor.

    scores: shared memory (TILES_NOW, HEADS, KEYS), NONE where there is no key. The caller multiplies sums over
    earlier keys by the factor of each head.
    """
    all_scores = scores._reinterpret(gl.float32, [TILES_NOW, HEADS, KEYS], FLAT3).load(TILES)
    new_max = gl.maximum(row_max, gl.max(gl.max(all_scores, axis=2), axis=0))
    prob = gl.exp2(all_scores - gl.expand_dims(gl.expand_dims(new_max, 0), 2))
    prob = gl.where(all_scores > NONE / 2, prob, 0.0)
    factor = gl.exp2(row_max - new_max)
    row_sum = row_sum * factor + gl.sum(gl.sum(prob, axis=2), axis=0)
    high, low = split_bfloat16(prob)
    both = probs._reinterpret(gl.bfloat16, [TILES_NOW, 2, HEADS, KEYS], HALVES_SHARED)
    both.store(gl.join(high, low).permute((0, 3, 1, 2)))
    return new_max, row_sum, factor


@gluon.jit
def times_of_heads(acc, of_heads):
    """Multiply acc (2 HEADS, DIMS) by each head's factor; `of_heads`, in shared memory, has the factors."""
    of_both = acc.reshape([2, HEADS, DIMS])
    factor = of_heads.load(gl.SliceLayout(0, gl.SliceLayout(2, of_both.type.layout)))
    of_both *= gl.expand_dims(gl.expand_dims(factor, 0), 2)
    return gl.convert_layout(of_both.reshape([2 * HEADS, DIMS]), PRODUCT)
