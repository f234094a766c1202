"""Scales of rows of W in Gluon: a thread loads those of its rows, all that a row has in a K step at once."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def scales_layout(num_rows: int, count: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Return the layout of (num_rows, count), powers of two, with rows as in a wgmma's operand in registers."""
    registers = [[0, 1 << i] for i in range(count.bit_length() - 1)] + [[8, 0]]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    warps = [[16 << i, 0] for i in range(num_warps.bit_length() - 1)]
    more_rows = num_rows // (16 * num_warps)
    registers += [[16 * num_warps << i, 0] for i in range(more_rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [num_rows, count])


@gluon.jit
def column_of(scales, INDEX: gl.constexpr, LAYOUT: gl.constexpr):
    """Select a column of (rows, count) as (rows, 1) of an operand's LAYOUT, without moving registers."""
    is_it = gl.arange(0, scales.shape[1], gl.SliceLayout(0, scales.type.layout)) == INDEX
    column = gl.sum(gl.where(is_it[None, :], scales, 0), axis=1)
    return gl.convert_layout(column, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
