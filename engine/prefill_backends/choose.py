"""Which backend does prefill attention: the fastest that is installed and fits, or the one that was asked for.

`choose` is pure. FlashAttention-3 is 1.4 to 5 times as fast as the paged kernel in every case, cuDNN up to 1.4 times
on long prompts (`benchmarks/kernels/attention/bench_attention_backends.py`, docs/performance_log.md).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.gpu.attention.backend import PagedAttention, PrefillAttention
from engine.prefill_backends import cudnn, fa3
from engine.prefill_backends.facts import Facts

logger = logging.getLogger(__name__)
BACKENDS: dict[str, Any] = {"fa3": fa3, "cudnn": cudnn}
"""By speed: modules with `is_installed`, `why_not` and `open_backend`."""


def facts_of(dtype: torch.dtype, pool: Tensor) -> Facts:
    """Looks at the pool, its device and at what is installed; imports nothing."""
    device = pool.device
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    capability = torch.cuda.get_device_capability(device) if is_nvidia else None
    installed = frozenset(name for name, backend in BACKENDS.items() if backend.is_installed(device))
    return Facts(dtype, pool.dtype, pool.shape[5], pool.shape[4], capability, installed)


def why_not(name: str, facts: Facts) -> str:
    """What keeps a backend from working, and what to do; empty when it works."""
    reason: str = BACKENDS[name].why_not(facts) if name in BACKENDS else ""
    return reason


def choose(wanted: str, facts: Facts) -> str:
    """`auto`: what was measured to be fastest; only where it was measured. Raises ConfigError."""
    if wanted == "auto":
        measured = BACKENDS if facts.capability == (9, 0) else ()
        return next((name for name in measured if not why_not(name, facts)), "triton")
    reason = why_not(wanted, facts)
    if reason:
        raise ConfigError(f"--attention-backend {wanted} {reason}")
    return wanted


def open_chosen(wanted: str, pool: Tensor, num_heads: int, dtype: torch.dtype, max_tokens: int) -> PrefillAttention:
    """The backend for one pool. max_tokens: of the largest step. Raises ConfigError."""
    chosen = choose(wanted, facts_of(dtype, pool))
    try:
        if chosen in BACKENDS:
            backend: PrefillAttention = BACKENDS[chosen].open_backend(pool, num_heads, dtype, max_tokens)
            return backend
    except torch.OutOfMemoryError:
        raise  # a RuntimeError, but another backend is no answer to it
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch, or cuDNN refuses the shape
        if wanted != "auto":
            raise ConfigError(f"--attention-backend {chosen} does not work here: {error}") from error
        logger.warning("attention with %s does not work here, so prompts are slower: %s", chosen, error)
    return PagedAttention(num_heads, pool.shape[3])
