"""The functions of `linear.c`, where the CPU has the instructions for them."""

from __future__ import annotations

import ctypes
import logging
import subprocess
from collections.abc import Iterator
from functools import cache

import torch

from kernels.gguf.compile import VARIANTS, Variant, library_path

logger = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The fastest variant; None where the CPU or a compiler lacks what is needed, which is logged once."""
    variant = next(variants_of_this_cpu(), None)
    if variant is None:
        logger.info("GGUF weights are converted: this CPU has no %s", ", ".join(VARIANTS[-1].instructions))
        return None
    try:
        return loaded(variant)
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        logger.warning("GGUF weights are converted, which is slower: their kernels cannot be compiled: %s", told)
        return None


def variants_of_this_cpu() -> Iterator[Variant]:
    """Yield those whose instructions it has, the fastest first."""
    capabilities = torch.cpu.get_capabilities()
    return (each for each in VARIANTS if all(map(capabilities.get, each.instructions)))


def loaded(variant: Variant) -> ctypes.CDLL:
    """Compile the variant if it is not there. Raises OSError, subprocess.SubprocessError."""
    found = ctypes.CDLL(str(library_path(variant)))
    found.gguf_linear.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int,  # segments, their number, columns
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int64,  # x, whether it is float32, rows
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int,  # y, its stride, whether it is float32
        ctypes.c_void_p, ctypes.c_int,  # bias, in integers
    ]  # fmt: skip
    found.gguf_has_integers.argtypes = [ctypes.c_int64, ctypes.c_int]
    found.gguf_dequantize.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return found
