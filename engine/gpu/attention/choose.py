"""Which backend does prefill attention: the fastest that is installed and fits, or the one that was asked for.

`choose` is pure. FlashAttention-3 is 1.4 to 5 times as fast as the paged kernel in every case, cuDNN up to 1.4 times
on long prompts (`benchmarks/kernels/attention/bench_attention_backends.py`, docs/performance_log.md).
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from common.wings import has_wing, require_wing
from engine.gpu.attention.backend import Facts, PrefillAttention
from engine.gpu.attention.paged import PagedAttention

logger = logging.getLogger(__name__)
WING = "engine.prefill_backends"
LIBRARIES = {  # by speed
    "fa3": "engine.prefill_backends.fa3:open_backend",
    "cudnn": "engine.prefill_backends.cudnn:open_backend",
}
MODULES = {name: path.partition(":")[0] for name, path in LIBRARIES.items() if has_wing(WING)}
BACKENDS: dict[str, Any] = {name: import_module(module) for name, module in MODULES.items()}
"""Installed backends: modules with `is_installed`, `why_not` and `open_backend`."""


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
    if wanted in LIBRARIES:
        require_wing(WING, f"--attention-backend {wanted}")
    facts = facts_of(dtype, pool)
    chosen = choose(wanted, facts)
    backend: PrefillAttention = PagedAttention(num_heads, pool.shape[3])
    try:
        if chosen in BACKENDS:
            backend = BACKENDS[chosen].open_backend(pool, num_heads, dtype, max_tokens)
    except torch.OutOfMemoryError:
        raise  # a RuntimeError, but another backend is no answer to it
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch, or cuDNN refuses the shape
        if wanted != "auto":
            raise ConfigError(f"--attention-backend {chosen} does not work here: {error}") from error
        logger.warning("attention with %s does not work here, so prompts are slower: %s", chosen, error)
    logger.info("prefill attention: %s", backend.name)
    return backend
