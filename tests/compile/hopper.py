"""Compiles kernels for an H200 on a machine without a GPU, as they would be launched there.

Triton needs a GPU only to launch. So tensors are `meta` tensors, of real sizes and without memory, the driver reports
the H200's architecture, and a launch ends after `ptxas`.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kernels.gpu

CAPABILITY = (9, 0)
NUM_SMS = 132
SHARED_BYTES = 232_448  # the limit per program
DEVICE_INDEX = 99  # unused otherwise: compiled kernels are cached by device index


@dataclass(frozen=True)
class Compiled:
    """spilled: bytes per thread spilled from registers to memory. barriers: initialized in shared memory.

    is_serial: whether wgmma instructions that should overlap with others are serialized.
    """

    name: str
    shared_bytes: int
    registers: int
    spilled: int
    is_serial: bool
    barriers: int


class Driver:
    """The parts of Triton's driver that compiling needs."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return DEVICE_INDEX

    def get_current_stream(self, _: int) -> int:
        return 0


def install(patch: pytest.MonkeyPatch) -> list[Compiled]:
    """Make launches only compile. Returns a list to which each compiled variant is appended once."""
    found: dict[str, Compiled] = {}
    compiled: list[Compiled] = []

    def at_grid(self: Any, grid: Any) -> Any:
        def compile_only(*args: Any, **constants: Any) -> None:
            kernel = self.run(*args, grid=grid, warmup=True, **constants)
            if kernel.hash not in found:
                found[kernel.hash] = resources(kernel)
                compiled.append(found[kernel.hash])

        return compile_only

    patch.setattr(driver, "_active", Driver())
    patch.setattr(JITFunction, "__getitem__", at_grid)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: CAPABILITY)
    patch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=NUM_SMS))
    for found_module in pkgutil.walk_packages(kernels.gpu.__path__, "kernels.gpu."):
        module = importlib.import_module(found_module.name)
        for name in ("overlaps_launches", "has_wgmma"):
            if hasattr(module, name):
                patch.setattr(module, name, lambda _: True)
    return compiled


def resources(kernel: Any) -> Compiled:
    """Return a kernel's resources from `cuobjdump` of Triton, and whether `ptxas` has serialized its wgmma."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = output_of("cuobjdump", "-res-usage", file.name)
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    spilled, is_serial = usage["STACK"] + usage["LOCAL"], False
    if "wgmma.wait_group.sync.aligned 1" in kernel.asm["ptx"]:
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(kernel.asm["ptx"])
            file.flush()
            said = output_of("ptxas", "-v", "-arch=sm_90a", file.name, "-o", os.devnull)
        is_serial = "wgmma.mma_async instructions are serialized" in said
    barriers = kernel.asm["ptx"].count("mbarrier.init")
    return Compiled(kernel.metadata.name, kernel.metadata.shared, usage["REG"], spilled, is_serial, barriers)


def output_of(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    done = subprocess.run([path, *arguments], check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout
