"""The GPUs of this machine, as the driver names them. Imports no torch, which takes seconds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILE = re.compile(r"nvidia(\d+)")


def uses_gpu(device: str) -> bool:
    """Whether workers will run on a GPU: whether the driver's device file is there."""
    return device == "cuda" or (device == "auto" and Path("/dev/nvidiactl").exists())


def find_gpus(device: str, env: Mapping[str, str]) -> list[str]:
    """Find the GPUs that workers can take; none when they will run on a CPU."""
    return visible_gpus(env, os.listdir("/dev")) if uses_gpu(device) else []


def visible_gpus(env: Mapping[str, str], device_files: Iterable[str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES lists, else the number of every device file in /dev."""
    listed = env.get(VISIBLE)
    if listed is not None:
        return [name for name in (part.strip() for part in listed.split(",")) if name and name != "-1"]
    numbers = [int(match[1]) for name in device_files if (match := _DEVICE_FILE.fullmatch(name))]
    return [str(number) for number in sorted(numbers)]
