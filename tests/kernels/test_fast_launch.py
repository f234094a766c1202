from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import FastLaunch


class Kernel:
    """A kernel that records its compilations and its launches."""

    arg_names = ("x", "n", "scale", "BLOCK", "IS_LAST")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.started: list[tuple[int, tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, **constants: Any) -> Variant:
            self.compiled.append((args, constants))
            return Variant(self, len(self.compiled) - 1)

        return run


class Variant:
    def __init__(self, kernel: Kernel, index: int) -> None:
        self.kernel, self.index = kernel, index

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.kernel.started.append((self.index, grid, args))


X = torch.zeros(64)


def start(
    fast: FastLaunch, x: Tensor = X, n: int | None = 32, block: int = 8, is_last: bool = False, warps: int = 4
) -> None:
    fast[(3, 2)](x, n, 0.5, IS_LAST=is_last, BLOCK=block, num_warps=warps)


def test_a_variant_that_has_run_is_started_with_its_constants_in_the_kernels_order() -> None:
    kernel = Kernel()
    fast = FastLaunch(kernel)
    start(fast)
    assert len(kernel.compiled) == 1
    other = torch.ones(64)
    fast[(5,)](other, 48, 0.25, IS_LAST=False, BLOCK=8, num_warps=4)
    assert len(kernel.compiled) == 1
    ((index, grid, args),) = kernel.started
    assert (index, grid) == (0, (5, 1, 1))
    assert args[0] is other
    assert args[1:] == (48, 0.25, 8, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"x": X[1:]}, {"x": X.double()}, {"n": 33}, {"n": 1}, {"n": 2**32}, {"n": None}, {"block": 16},
        {"is_last": True}, {"warps": 8},
    ],
)  # fmt: skip
def test_what_triton_compiles_anew_for_is_another_variant(changes: dict[str, Any]) -> None:
    kernel = Kernel()
    fast = FastLaunch(kernel)
    start(fast)
    start(fast, **changes)
    assert len(kernel.compiled) == 2
    start(fast)
    start(fast, **changes)
    assert [index for index, _, _ in kernel.started] == [0, 1]


@FastLaunch
@triton.jit
def _shift_kernel(x_ptr, out_ptr, n, by, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=inside) + by, mask=inside)


def test_a_real_kernel_gives_the_same_every_time(device: torch.device) -> None:
    """Covers each kind of addresses and numbers for which Triton compiles a separate variant."""
    memory = torch.randn(200, device=device)
    for _ in range(2):
        for first, n, by in ((0, 64, 1), (1, 64, 2), (0, 33, 16), (4, 1, 3), (0, 100, 2**33)):
            x = memory[first : first + n]
            out = torch.full_like(memory, float("nan"))
            _shift_kernel[(triton.cdiv(n, 32),)](x, out, n, by, BLOCK=32, num_warps=1)
            assert torch.equal(out[:n], x + by)
            assert out[n:].isnan().all()
