"""Which backend does prefill attention: the fastest that is installed and fits, or the one that was asked for.

`choose` is pure. FlashAttention-3 is 1.4 to 5 times as fast as the paged kernel in every case, cuDNN up to 1.4 times
on long prompts (`benchmarks/kernels/attention/bench_attention_backends.py`, docs/performance_log.md).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError
from common.wings import has_wing, require_wing
from engine.gpu.attention.backend import PrefillAttention
from engine.gpu.attention.paged import PagedAttention

LIBRARIES = "engine.prefill_backends"
HAS_LIBRARIES = has_wing(LIBRARIES)
if HAS_LIBRARIES:
    from engine.prefill_backends import cudnn, fa3

logger = logging.getLogger(__name__)
FA3_REQUIREMENT = "fa3-fwd==0.0.3"
FA3_HEAD_DIMS = (64, 128)
HALF_TYPES = (torch.bfloat16, torch.float16)
BY_SPEED = ("fa3", "cudnn")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the choice depends on. capability: of an NVIDIA GPU, else None."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    block_size: int
    capability: tuple[int, int] | None
    has_fa3: bool
    has_cudnn: bool


def facts_of(dtype: torch.dtype, pool: Tensor) -> Facts:
    """Looks at the pool, its device and at what is installed; imports nothing."""
    device = pool.device
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return Facts(
        dtype,
        pool.dtype,
        pool.shape[5],
        pool.shape[4],
        torch.cuda.get_device_capability(device) if is_nvidia else None,
        HAS_LIBRARIES and bool(fa3.installed_package()),
        HAS_LIBRARIES and is_nvidia and torch.backends.cudnn.version() is not None,  # type: ignore[no-untyped-call]
    )


def why_not(name: str, facts: Facts) -> str:
    """What keeps a backend from working, and what to do; empty when it works."""
    if name == "fa3":
        if facts.capability is None or facts.capability[0] not in (8, 9):
            return "needs an NVIDIA GPU of compute capability 8 or 9; use triton"
        if facts.dtype != torch.bfloat16:
            return "takes bfloat16 alone; use triton"
        if facts.head_dim not in FA3_HEAD_DIMS:
            return f"takes heads of {FA3_HEAD_DIMS}, not {facts.head_dim}; use triton"
        if not facts.has_fa3:
            return f"is not installed; run: pip install {FA3_REQUIREMENT}"
    if name == "cudnn":
        if facts.capability is None or facts.capability[0] < 8 or not facts.has_cudnn:
            return "needs an NVIDIA GPU of compute capability 8 or more and cuDNN; use triton"
        if facts.dtype not in HALF_TYPES or facts.kv_dtype != facts.dtype:
            return "takes 16-bit numbers and KV alone; use triton"
        if facts.head_dim > 128:
            return f"takes heads up to 128, not {facts.head_dim}; use triton"
    return ""


def choose(wanted: str, facts: Facts) -> str:
    """`auto`: what was measured to be fastest; only where it was measured. Raises ConfigError."""
    if wanted == "auto":
        measured = BY_SPEED if facts.capability == (9, 0) else ()
        return next((name for name in measured if not why_not(name, facts)), "triton")
    reason = why_not(wanted, facts)
    if reason:
        raise ConfigError(f"--attention-backend {wanted} {reason}")
    return wanted


def open_attention(
    wanted: str, pool: Tensor, num_heads: int, dtype: torch.dtype, max_tokens: int, needs: str = ""
) -> PrefillAttention:
    """The backend for one pool. Raises ConfigError.

    max_tokens: of the largest step. needs: what of the model's attention our kernel alone can; empty: nothing.
    """
    if needs:
        if wanted not in ("auto", "triton"):
            raise ConfigError(f"--attention-backend {wanted} knows no {needs}; use triton")
        return PagedAttention(num_heads, pool.shape[3])
    if wanted in BY_SPEED:
        require_wing(LIBRARIES, f"--attention-backend {wanted}")
    facts = facts_of(dtype, pool)
    chosen = choose(wanted, facts)
    backend: PrefillAttention = PagedAttention(num_heads, pool.shape[3])
    try:
        if chosen == "fa3":
            backend = fa3.FlashAttention3(fa3.load(), pool, num_heads, dtype)
        elif chosen == "cudnn":
            backend = cudnn.CudnnAttention(cudnn.attend_with_cudnn, pool, num_heads, dtype, max_tokens)
    except torch.OutOfMemoryError:
        raise  # a RuntimeError, but another backend is no answer to it
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch, or cuDNN refuses the shape
        if wanted != "auto":
            raise ConfigError(f"--attention-backend {chosen} does not work here: {error}") from error
        logger.warning("attention with %s does not work here, so prompts are slower: %s", chosen, error)
    logger.info("prefill attention: %s", backend.name)
    return backend
