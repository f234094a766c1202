"""Programmatic dependent launch: a kernel's programs start while the previous kernel is still running.

A kernel that takes part lets its successor start and waits for its predecessor before it touches memory that another
kernel of the step writes (`wait_for_predecessor`). Every kernel waits, so that what is two kernels back has ended
too. Weights, and what was there before the step (its inputs, KV of earlier tokens), may be read or asked for
(`prefetch`) before the wait. Between many short kernels, as in a decode step, this hides the start of each one and
some of the memory's latency.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@cache
def _major_capability(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


def overlaps_launches(x: Tensor) -> bool:
    """Whether kernels on the device of `x` can be launched this way; the constant OVERLAPS of a kernel."""
    return x.is_cuda and _major_capability(x.device.index) >= 9


def has_wgmma(x: Tensor) -> bool:
    """Whether the GPU of `x` is a Hopper: others have no asynchronous GEMM instructions of warpgroups."""
    return x.is_cuda and _major_capability(x.device.index) == 9


def is_compiled(x: Tensor) -> bool:
    """Whether kernels on the device of `x` are compiled, not interpreted; the constant COMPILED of a kernel."""
    return x.device.type != "cpu"


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; a few where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def wait_for_predecessor(OVERLAPS: tl.constexpr):
    """Let the next kernel's programs start, then wait until all memory of the previous kernel is visible."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_successor_start(OVERLAPS: tl.constexpr):
    """The first half of `wait_for_predecessor`."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_first(OVERLAPS: tl.constexpr):
    """The second half of `wait_for_predecessor`.

    Done before `let_successor_start`, the next kernel's programs come when the kernels before have left. Those that
    come while others fill some multiprocessors all go to the rest, and stay there.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers, ENABLED: tl.constexpr):
    """Ask for the lines of `pointers` to be brought into the L2 cache; for weights, before the wait."""
    if ENABLED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
