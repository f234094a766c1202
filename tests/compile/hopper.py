"""Compiles for an H200 what would be launched there, on a machine without a GPU.

Triton needs no GPU to compile, only to launch. So tensors are `meta` ones, of real sizes and without memory, the
driver is one that names the H200's architecture, and a launch ends after `ptxas`.
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
SHARED_BYTES = 232_448  # the most that a program may have
DEVICE_INDEX = 99  # nobody else's: what is compiled for a device is kept by its index


@dataclass(frozen=True)
class Compiled:
    """spilled: bytes of a thread's registers that went to memory. barriers: in shared memory, that it initializes.

    is_serial: products that should overlap with other instructions are waited for one by one.
    """

    name: str
    shared_bytes: int
    registers: int
    spilled: int
    is_serial: bool
    barriers: int


class Driver:
    """As much of Triton's driver as compiling asks for."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return DEVICE_INDEX

    def get_current_stream(self, _: int) -> int:
        return 0


def install(patch: pytest.MonkeyPatch) -> list[Compiled]:
    """From now on launches only compile. Returns the list that takes what was compiled, each variant once."""
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
    """What `cuobjdump`, which comes with Triton, says of a kernel's machine code, and `ptxas` of its products."""
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
