"""Assignment of GPUs to the workers of a local cluster. Pure; asks no driver, imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILE = re.compile(r"nvidia(\d+)")


def visible_gpus(env: Mapping[str, str], device_files: Iterable[str]) -> list[str]:
    """Names as CUDA_VISIBLE_DEVICES takes them: what it lists, else the number of every device file in /dev."""
    listed = env.get(VISIBLE)
    if listed is not None:
        return [name for name in (part.strip() for part in listed.split(",")) if name and name != "-1"]
    numbers = [int(match[1]) for name in device_files if (match := _DEVICE_FILE.fullmatch(name))]
    return [str(number) for number in sorted(numbers)]


def visible_order(gpus: list[str], worker: int) -> str:
    """CUDA_VISIBLE_DEVICES of a worker: its own GPU first, the others behind it, so that it can map their pools."""
    own = worker % len(gpus)
    return ",".join([*gpus[own:], *gpus[:own]])


def workers_on_same_gpu(num_gpus: int, worker: int, num_workers: int) -> int:
    """Number of workers on the GPU of `worker`, itself included."""
    return len(range(worker % num_gpus, num_workers, num_gpus))
