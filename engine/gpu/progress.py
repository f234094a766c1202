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


class DeviceTimer:
    """Times what the current stream is given from now until `stop`, by the device's clock. Does not wait."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._began.record()

    def stop(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        """Wait for the end."""
        self._ended.synchronize()
        milliseconds: float = self._began.elapsed_time(self._ended)
        return milliseconds / 1e3


def check_alive(device: torch.device) -> None:
    """After a failure. Raises DeviceLostError when the device fails whatever it is asked."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError("the GPU does not work any more") from error
