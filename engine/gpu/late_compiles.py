"""Says which kernels Triton compiles while requests are served: every stream waits for that."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton

logger = logging.getLogger(__name__)


def log_late_compiles() -> None:
    """Log each kernel that is compiled from now on in this process. Called at the end of a warm-up."""
    began: dict[str, float] = {}

    def before(*, repr: str, **_: Any) -> None:
        began[repr] = time.monotonic()

    def after(*, repr: str, **_: Any) -> None:
        milliseconds = (time.monotonic() - began.pop(repr, time.monotonic())) * 1e3
        logger.warning("streams waited %.0f ms for a kernel that the warm-up did not compile: %s", milliseconds, repr)

    triton.knobs.runtime.jit_cache_hook = before
    triton.knobs.runtime.jit_post_compile_hook = after


@contextmanager
def compiles_are_early() -> Iterator[None]:
    """Log none of the kernels compiled inside: no request waits for them yet."""
    hooks = triton.knobs.runtime.jit_cache_hook, triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_post_compile_hook = None
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook, triton.knobs.runtime.jit_post_compile_hook = hooks
