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

    def before(*, key: str, **_: Any) -> None:
        began[key] = time.monotonic()

    def after(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        milliseconds = (time.monotonic() - began.pop(key, time.monotonic())) * 1e3
        variant = _variant(compile["signature"], compile["constants"], compile["configs"][0])
        logger.warning(
            "streams waited %.0f ms for a kernel that the warm-up did not compile: %s(%s)",
            milliseconds, fn.name, variant,
        )  # fmt: skip

    triton.knobs.runtime.jit_cache_hook = before
    triton.knobs.runtime.jit_post_compile_hook = after


def _variant(signature: dict[str, str], constants: dict[tuple[int, ...], Any], attributes: dict[Any, Any]) -> str:
    """`x_ptr: *bf16 / 16, num_rows: i32, DIMS = 64`: arguments that are multiples of 16, and those compiled in."""
    described = []
    for index, (name, kind) in enumerate(signature.items()):
        if (index,) in constants:
            described.append(f"{name} = {constants[index,]}")
        else:
            described.append(f"{name}: {kind}" + (" / 16" if attributes.get((index,)) else ""))
    return ", ".join(described)


@contextmanager
def compiles_are_early() -> Iterator[None]:
    """Log none of the kernels compiled inside: no request waits for them yet."""
    hooks = triton.knobs.runtime.jit_cache_hook, triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_post_compile_hook = None
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook, triton.knobs.runtime.jit_post_compile_hook = hooks
