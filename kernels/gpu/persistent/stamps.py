"""Stamps of the multiprocessor's clock at the stages of a layer, with `Shape.traces`."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

STAGES = (
    "receive x", "qkv", "receive heads", "rotate", "receive queries", "tiles", "store partials", "receive partials",
    "combine", "values", "receive attended", "output", "receive y", "router", "receive logits", "choose", "gate_up",
    "receive gated", "down",
)  # fmt: skip
NUM_STAMPS = gl.constexpr(len(STAGES) + 1)
NUMBERS = {name: number for number, name in enumerate((*STAGES, "end"))}


@triton.constexpr_function
def number_of(stage: str) -> int:
    return NUMBERS[stage]


@gluon.jit
def stamp(stamps, stage: gl.constexpr, SHAPE: gl.constexpr):
    """Store the clock at the beginning of a stage. stamps: of the program and the layer."""
    if SHAPE.value.traces:
        clock = gl.inline_asm_elementwise(
            "mov.u64 $0, %clock64; // $1", "=l,l", [stamps], dtype=gl.int64, is_pure=False, pack=1
        )
        gl.store(stamps + number_of(stage), clock)
