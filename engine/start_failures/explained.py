"""Failures while an engine starts on a GPU, told with the numbers and with what to do. Knows no models.

Memory ends in many voices: torch's allocator, the driver under Triton or a graph's capture, cuBLAS and cuDNN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from common.errors import ConfigError

OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
NO_COMPILER = "Failed to find C compiler"  # Triton's words
LESS_KV = (
    "Lower --gpu-memory-fraction, --kv-cache-gb, --num-gpu-blocks, --max-num-batched-tokens or --max-num-seqs, stop "
    "what else runs on the GPU, or choose a smaller model"
)
SMALLER_WEIGHTS = (
    "The weights do not fit: choose a smaller model or one that is quantized already (or use --quant-mode, which "
    "quantizes while it loads), or stop what else runs on the GPU"
)


def of_loading() -> AbstractContextManager[None]:
    """Explain failures inside, where the weights are what a GPU has no room for."""
    return explained(SMALLER_WEIGHTS)


@contextmanager
def explained(advice: str = LESS_KV) -> Iterator[None]:
    """Turns what the GPU could not do into a ConfigError; other exceptions pass. advice: when memory has ended."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise ConfigError(describe_out_of_memory(advice)) from error
        if NO_COMPILER in str(error):
            raise ConfigError(
                "Triton compiles GPU kernels with a C compiler, and there is none: install gcc, or name one with CC"
            ) from error
        raise


def is_out_of_memory(error: BaseException | None) -> bool:
    """Also when that came before `error`: a graph whose capture breaks off raises another error over it."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_out_of_memory(advice: str = LESS_KV) -> str:
    """What to say when the current GPU had no memory left."""
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # no room for this process's context
        return "the GPU has no memory left at all: stop what else runs on it (nvidia-smi lists it)"
    own = torch.cuda.memory_reserved()
    return (
        f"the GPU has too little memory: {total / 1e9:.1f} GB in all, {own / 1e9:.1f} GB held by this worker, "
        f"{free / 1e9:.1f} GB free. {advice}"
    )
