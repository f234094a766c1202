"""Waits for conditions. Timeouts are long, for busy machines: only failing tests reach them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 100.0
PAUSE_SECONDS = 0.01


def wait_until(condition: Callable[..., object], seconds: float = PATIENCE_SECONDS, message: object = "") -> None:
    """Wait until the condition is true. message: shown if that fails; a function is called for its text."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message() if callable(message) else message
        time.sleep(PAUSE_SECONDS)


async def until(condition: Callable[..., object], seconds: float = PATIENCE_SECONDS, message: object = "") -> None:
    """`wait_until` for an event loop; the condition is called on another thread."""
    await asyncio.to_thread(wait_until, condition, seconds, message)
