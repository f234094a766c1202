"""The functions of `linear.c`, where the CPU has the instructions for them."""

from __future__ import annotations

import ctypes
import logging
import subprocess
from functools import cache

import torch

from kernels.gguf.compile import library_path

logger = logging.getLogger(__name__)
INSTRUCTIONS = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni", "avx512_bf16", "fma3", "f16c")


@cache
def library() -> ctypes.CDLL | None:
    """None where the CPU or a compiler lacks what is needed, which is logged once."""
    capabilities = torch.cpu.get_capabilities()
    missing = [name for name in INSTRUCTIONS if not capabilities.get(name)]
    if missing:
        logger.info("GGUF weights are converted: this CPU has no %s", ", ".join(missing))
        return None
    try:
        found = ctypes.CDLL(str(library_path()))
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        logger.warning("GGUF weights are converted, which is slower: their kernels cannot be compiled: %s", told)
        return None
    found.gguf_scratch_bytes.restype = ctypes.c_int64
    return found
