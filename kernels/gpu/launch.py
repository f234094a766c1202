"""Launches of Triton kernels: programs that start while the previous kernel still runs, and a short way to start one.

Programmatic dependent launch: a kernel that takes part lets its successor start and waits for its predecessor before
it touches memory that another kernel of the step writes (`wait_for_predecessor`). Every kernel waits, so that what is
two kernels back has ended too. Weights, and what was there before the step (its inputs, KV of earlier tokens), may be
read or asked for (`prefetch`) before the wait. Between many short kernels, as in a decode step, this hides the start
of each one and some of the memory's latency.

`FastLaunch` starts a kernel in half of the host time that `kernel[grid](...)` takes. Triton binds arguments by name,
derives from them which variant of a kernel is needed, and finds it by a text made of all that: 12 to 18 us a launch
in a loop, 25 between other operations. Steps with prompts of a small model are bound by it. There the key is a tuple
of what variants depend on, and a variant that has run once is started directly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

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


def traits(value: Any) -> Any:
    """What of an argument its kernel's variants depend on.

    A variant depends on its constants, on arguments' types, on whether an address is a multiple of 16, and on whether
    an integer is 1, a multiple of 16, or beyond 32 bits. That is the rule of `triton.jit`; an argument that it was
    told not to look at only gets some keys more here.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return type(value)


class FastLaunch:
    """Wraps a `triton.jit` kernel and is used as one: `kernel[grid](*arguments, **constants_and_options)`.

    The kernel's constants come last and by name, its first argument is a tensor.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._variants: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(*args: Any, **constants: Any) -> None:
            key = (args[0].get_device(), tuple(constants), *constants.values(), *map(traits, args))
            found = self._variants.get(key)
            if found is not None:
                variant, last = found
                variant[(*grid, 1, 1)[:3]](*args, *last)
                return
            variant = self.kernel[grid](*args, **constants)
            if variant is not None:  # the interpreter compiles nothing
                self._variants[key] = variant, tuple(constants[name] for name in self.kernel.arg_names[len(args) :])

        return start
