"""The GPUs of this machine, as the driver names them, and what they hold. Imports no torch, which takes seconds."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILE = re.compile(r"nvidia(\d+)")
_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
QUERY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Gpus:
    """names: as CUDA_VISIBLE_DEVICES takes them. memory_bytes: of the smallest; 0: not known."""

    names: tuple[str, ...] = ()
    memory_bytes: int = 0


def uses_gpu(device: str) -> bool:
    """Whether workers will run on a GPU: whether the driver's device file is there."""
    return device == "cuda" or (device == "auto" and Path("/dev/nvidiactl").exists())


def find_gpus(device: str, env: Mapping[str, str]) -> Gpus:
    """Find the GPUs that workers can take; none when they will run on a CPU."""
    if not uses_gpu(device):
        return Gpus()
    return Gpus(tuple(visible_gpus(env, os.listdir("/dev"))), smallest_memory())


def visible_gpus(env: Mapping[str, str], device_files: Iterable[str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES lists, else the number of every device file in /dev."""
    listed = env.get(VISIBLE)
    if listed is not None:
        return [name for name in (part.strip() for part in listed.split(",")) if name and name != "-1"]
    numbers = [int(match[1]) for name in device_files if (match := _DEVICE_FILE.fullmatch(name))]
    return [str(number) for number in sorted(numbers)]


def smallest_memory() -> int:
    """Bytes of the GPU with the least memory; 0 when the driver's tool does not say."""
    try:
        found = subprocess.run(_QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True).stdout
        return min(int(line) for line in found.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0
