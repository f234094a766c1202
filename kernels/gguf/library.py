"""The functions of `linear.c`, if the CPU has the instructions for them."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

from kernels.native.compile import VARIANTS
from kernels.native.library import load, variants_of_this_cpu

FOLDER = Path(__file__).resolve().parent
logger = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """Return the fastest variant; None if the CPU or compiler lacks something, which is logged once."""
    variant = next(variants_of_this_cpu(), None)
    if variant is None:
        logger.info("GGUF weights are converted: this CPU has no %s", ", ".join(VARIANTS[-1].instructions))
        return None
    found = load(FOLDER, variant, _tell)
    return found if found is None else declared(found)


def _tell(reason: object) -> None:
    logger.warning("GGUF weights are converted, which is slower: their kernels cannot be compiled: %s", reason)


def declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of the library's functions, and return it."""
    found.gguf_linear.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int,  # segments, their number, columns
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int64,  # x, whether it is float32, rows
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int,  # y, its stride, whether it is float32
        ctypes.c_void_p, ctypes.c_int,  # bias, in integers
    ]  # fmt: skip
    found.gguf_experts.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int,  # experts, their number, hidden, inner
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p,  # x, tokens, chosen, shares
        ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,  # choices, most tokens, `native_silu_mul`
        ctypes.c_float, ctypes.c_float, ctypes.c_void_p,  # alpha, limit, y
    ]  # fmt: skip
    found.gguf_has_integers.argtypes = [ctypes.c_int64, ctypes.c_int]
    found.gguf_dequantize.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return found
