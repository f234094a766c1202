"""Starts Triton kernels in half of the host time that `kernel[grid](...)` takes.

Triton binds arguments by name, derives from them which variant of a kernel is needed, and finds it by a text made of
all that: 12 to 18 us a launch in a loop, 25 between other operations. Steps with prompts of a small model are bound
by it. Here the key is a tuple of what variants depend on, and a variant that has run once is started directly.

A kernel's variant depends on its constants, on arguments' types, on whether an address is a multiple of 16, and on
whether an integer is 1, a multiple of 16, or beyond 32 bits. That is the rule of `triton.jit`; an argument that it
was told not to look at only gets some keys more here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def traits(value: Any) -> Any:
    """What of an argument its kernel's variants depend on."""
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
