"""How far a device has come: waiting for what it has been given so far, and whether it still works at all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.engine import DeviceLostError


def mark(device: torch.device) -> Callable[[], None]:
    """A function that waits until the current stream has done what it has been given until now."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def check_alive(device: torch.device) -> None:
    """After a failure. Raises DeviceLostError when the device fails whatever it is asked."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError("the GPU does not work any more") from error
