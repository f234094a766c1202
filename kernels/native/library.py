"""Loads C code of folders in the fastest variant that this CPU supports, and the code of this folder."""

from __future__ import annotations

import ctypes
import logging
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

from kernels.native.compile import ANY_CPU, VARIANTS, Variant, library_path

FOLDER = Path(__file__).resolve().parent
DTYPES = (torch.bfloat16, torch.float32)  # dtypes of numbers that this folder's functions take
logger = logging.getLogger(__name__)


def variants_of_this_cpu() -> Iterator[Variant]:
    """Yield the variants that this CPU supports, fastest first."""
    capabilities = torch.cpu.get_capabilities()
    return (each for each in VARIANTS if all(map(capabilities.get, each.instructions)))


def loaded(folder: Path, variant: Variant) -> ctypes.CDLL:
    """Load the variant, compiled first if needed. Raises OSError, subprocess.SubprocessError."""
    return ctypes.CDLL(str(library_path(folder, variant)))


def load(folder: Path, variant: Variant, tell: Callable[[object], None]) -> ctypes.CDLL | None:
    """Load the library; None if it cannot be compiled, after calling `tell` with the reason."""
    try:
        return loaded(folder, variant)
    except (OSError, subprocess.SubprocessError) as error:
        tell(getattr(error, "stderr", None) or error)
        return None


@cache
def library() -> ctypes.CDLL | None:
    """Return this folder's functions; None if they cannot be compiled, which is logged once."""
    found = load(FOLDER, next(variants_of_this_cpu(), ANY_CPU), _tell)
    return found if found is None else declared(found)


def _tell(reason: object) -> None:
    logger.warning("this CPU is slower than it could be: its kernels cannot be compiled: %s", reason)


def declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of the library's functions, and return it."""
    at, flag, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    found.native_attend.argtypes = [at, size, at, at, size, at, size, at]
    found.native_add_rms_norm.argtypes = [at, at, flag, at, ctypes.c_float, size, size, at, flag]
    found.native_rotate.argtypes = [at, flag, size, size, size, size, size, at, size, at, size]
    found.native_silu_mul.argtypes = [at, at, flag, size, size, ctypes.c_float, ctypes.c_float]
    return found
