"""Wait for a condition. The bound only ends a test that has failed: on a busy machine all takes longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 100.0
PAUSE_SECONDS = 0.01


def wait_until(condition: Callable[..., object], seconds: float = PATIENCE_SECONDS, told: object = "") -> None:
    """told: shown when it does not come true; a function is called then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told() if callable(told) else told
        time.sleep(PAUSE_SECONDS)


async def until(condition: Callable[..., object], seconds: float = PATIENCE_SECONDS, told: object = "") -> None:
    """`wait_until` for an event loop; a condition that asks over HTTP does so on a thread."""
    await asyncio.to_thread(wait_until, condition, seconds, told)
