"""Launches of Triton kernels: programmatic dependent launch, and a launcher with little host time.

With programmatic dependent launch a kernel lets its successor start early, and waits for its predecessor before it
touches memory that other kernels of the step write (`wait_for_predecessor`). Every kernel waits, so earlier kernels
have ended, too. Weights, the step's inputs and the KV of earlier tokens may be read or prefetched before the wait. In
a decode step of many short kernels this hides their start-up and some memory latency.

`FastLaunch` takes half of the host time of `kernel[grid](...)`. Triton binds arguments by name, derives the kernel's
variant and finds it by a string: 12 to 18 us a launch in a loop, 25 between other operations, which bounds steps with
prompts of small models. `FastLaunch` finds a variant that has run once by a tuple, and starts it directly.
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
    """Whether the device of `x` has programmatic dependent launch; the constant OVERLAPS of kernels."""
    return x.is_cuda and _major_capability(x.device.index) >= 9


def has_wgmma(x: Tensor) -> bool:
    """Whether the GPU of `x` is a Hopper, the only one with WGMMA instructions."""
    return x.is_cuda and _major_capability(x.device.index) == 9


def is_compiled(x: Tensor) -> bool:
    """Whether kernels on the device of `x` are compiled, not interpreted; the constant COMPILED of kernels."""
    return x.device.type != "cpu"


def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU; a few where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def wait_for_predecessor(OVERLAPS: tl.constexpr):
    """Let the next kernel's programs start, then wait until all writes of the previous kernel are visible."""
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

    Called before `let_successor_start`, it delays the next kernel's programs until earlier kernels have ended, so
    that they spread over all multiprocessors. Otherwise all would go to the few multiprocessors that are free.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers, ENABLED: tl.constexpr):
    """Prefetch the cache lines of `pointers` into L2; for weights, before the wait."""
    if ENABLED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


def traits(value: Any) -> Any:
    """Return the properties of an argument that select the kernel's variant.

    By the rules of `triton.jit` these are its type, whether an address is a multiple of 16, and whether an integer is
    1, a multiple of 16 or beyond 32 bits. Arguments in `do_not_specialize` only cause some extra keys here.
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
