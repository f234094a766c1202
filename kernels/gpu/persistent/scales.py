"""Scales of e4m3 weights, one per row, in the layouts of GEMVs, and biases; bfloat16 weights have no scales.

Warps issue in order: an instruction that waits for a load stalls all that follow. So addresses are loaded well ahead
of scales.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gpu.persistent.gemv import tile_numbers, tile_rows
from kernels.gpu.persistent.operand import SUMS
from kernels.gpu.persistent.ring import DIMS, chosen_experts, num_chunks, one_of
from kernels.gpu.persistent.stream import BIAS, SCALES


@gluon.jit
def scales_of(addresses, WEIGHT: gl.constexpr, SHAPE: gl.constexpr):
    """Load the address of a weight's scales. addresses: of a layer."""
    ptr = addresses
    if SHAPE.value.is_e4m3:
        ptr = gl.load(addresses + SCALES + WEIGHT).to(gl.pointer_type(gl.float32))
    return ptr


@gluon.jit
def _of_rows(ptr, N: gl.constexpr, EXIST: gl.constexpr, OTHERWISE: gl.constexpr, SHAPE: gl.constexpr):
    """Load numbers for the program's rows of W (N, any), in the layout of `tile_rows`; without EXIST, OTHERWISE."""
    numbers = OTHERWISE
    if EXIST:
        rows, exist = tile_rows(N, SHAPE)
        numbers = gl.load(ptr + rows, mask=exist, other=0.0).to(gl.float32)
    return numbers


@gluon.jit
def row_scales(ptr, N: gl.constexpr, SHAPE: gl.constexpr):
    """Load scales of the program's rows of W (N, any), or return 1."""
    return _of_rows(ptr, N, SHAPE.value.is_e4m3, 1.0, SHAPE)


@gluon.jit
def biases_of(addresses, SHAPE: gl.constexpr):
    """Load the address of the bias of W_qkv. addresses: of a layer."""
    ptr = addresses
    if SHAPE.value.has_biases:
        ptr = gl.load(addresses + BIAS).to(gl.pointer_type(gl.bfloat16))
    return ptr


@gluon.jit
def row_biases(ptr, N: gl.constexpr, SHAPE: gl.constexpr):
    """Load biases of the program's rows of W (N, any), or return 0."""
    return _of_rows(ptr, N, SHAPE.value.has_biases, 0.0, SHAPE)


@gluon.jit
def gate_up_scales(ptr, experts, SHAPE: gl.constexpr):
    """Load scales of the program's rows of gate, and of up. experts: the token's, in shared memory."""
    INNER: gl.constexpr = SHAPE.value.intermediate
    scales = 1.0, 1.0
    if SHAPE.value.is_e4m3:
        rows, exist = tile_rows(SHAPE.value.inner, SHAPE)
        if SHAPE.value.experts:
            chosen = chosen_experts(experts, SHAPE.value.chosen)
            expert = one_of(chosen, tile_numbers(SHAPE) // (INNER // 8), SHAPE.value.chosen)
            rows = expert[:, None] * (2 * INNER) + rows % INNER
        at = ptr + rows
        scales = gl.load(at, mask=exist, other=0.0), gl.load(at + INNER, mask=exist, other=0.0)
    return scales


@gluon.jit
def down_scales(ptr, experts, smem, SHAPE: gl.constexpr):
    """Load scales of the token's experts' rows of W_down, for a chunk of two tiles each: (slices of K, 16, 1).

    The chunks of one pair of tiles, then those of the next one, as `gemv` expects; an empty tuple if scales do not
    differ by columns.
    """
    H: gl.constexpr = SHAPE.value.hidden
    P: gl.constexpr = SHAPE.value.programs
    S: gl.constexpr = smem.shape[1]
    COUNT: gl.constexpr = SHAPE.value.chosen
    OF_EXPERT: gl.constexpr = SHAPE.value.intermediate // DIMS  # slices
    found = ()
    if SHAPE.value.is_e4m3 and SHAPE.value.experts:
        chosen = chosen_experts(experts, COUNT)
        k_slice = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None]
        row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :]
        for first_tile in gl.static_range(0, (H // 8 + P - 1) // P, 2):
            rows = (gl.program_id(0) + (first_tile + row // 8) * P) * 8 + row % 8
            for chunk in gl.static_range(num_chunks(COUNT * OF_EXPERT * DIMS, S)):
                number = chunk * S + k_slice
                expert = one_of(chosen, number // OF_EXPERT, COUNT)
                inside = (number < COUNT * OF_EXPERT) & (rows < H)
                scale = gl.load(ptr + expert * H + rows, mask=inside, other=0.0)
                found = found + (gl.expand_dims(scale, 2),)  # type: ignore[assignment]  # noqa: RUF005  Triton's tuples unpack nothing
    return found
