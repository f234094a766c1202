"""Load a folder's C code in the fastest variant that this CPU has instructions for."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kernels.native.compile import VARIANTS, Variant, library_path


def variants_of_this_cpu() -> Iterator[Variant]:
    """Yield those whose instructions it has, the fastest first."""
    capabilities = torch.cpu.get_capabilities()
    return (each for each in VARIANTS if all(map(capabilities.get, each.instructions)))


def loaded(folder: Path, variant: Variant) -> ctypes.CDLL:
    """Compile the variant if it is not there. Raises OSError, subprocess.SubprocessError."""
    return ctypes.CDLL(str(library_path(folder, variant)))


def load(folder: Path, variant: Variant, tell: Callable[[object], None]) -> ctypes.CDLL | None:
    """The library; None where it cannot be compiled: `tell` is given the reason."""
    try:
        return loaded(folder, variant)
    except (OSError, subprocess.SubprocessError) as error:
        tell(getattr(error, "stderr", None) or error)
        return None
