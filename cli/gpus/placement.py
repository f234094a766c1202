"""Finds a machine's GPUs, the default workers for it, and the GPUs of each worker. Imports no torch.

On a CPU, a prefill and a decode worker share the cores, so that a laptop can try disaggregation. On GPUs every worker
does both: on one H200, two workers that share it take 154 ms instead of 51 to the first token and have 20 to 33% less
throughput; on two, a prefill and a decode worker gave 5.6k tok/s where two that do both gave 8.6k.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.cluster.plan import VISIBLE

_DEVICE_FILE = re.compile(r"nvidia(\d+)")


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker's GPUs. visible: these first, then the others, so that the worker can map their pools."""

    gpus: tuple[str, ...]
    visible: str
    num_sharing: int  # workers on its fullest GPU, including itself


def uses_gpu(device: str) -> bool:
    """Whether workers will run on a GPU: whether the driver's device file exists."""
    return device == "cuda" or (device == "auto" and Path("/dev/nvidiactl").exists())


def find_gpus(device: str) -> list[str]:
    """Return the GPUs that workers can take; none if they will run on a CPU."""
    return visible_gpus(os.environ, os.listdir("/dev")) if uses_gpu(device) else []


def visible_gpus(env: Mapping[str, str], device_files: Iterable[str]) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES lists, otherwise the number of every device file in /dev."""
    listed = env.get(VISIBLE)
    if listed is not None:
        return [name for name in (part.strip() for part in listed.split(",")) if name and name != "-1"]
    numbers = [int(match[1]) for name in device_files if (match := _DEVICE_FILE.fullmatch(name))]
    return [str(number) for number in sorted(numbers)]


def choose_workers(prefill: int, decode: int, num_ranks: int, num_gpus: int) -> tuple[int, int, str]:
    """Fill in the number of workers of a role where it is negative, and return why. num_ranks: of each worker."""
    reason = ""
    if prefill < 0:
        prefill = 0
        reason = "workers do both: prefill and decode workers of their own pay when prompts disturb streams"
    if decode < 0:
        decode = max(num_gpus // num_ranks - prefill, 1)
    return prefill, decode, reason


def place(gpus: Sequence[str], sizes: Sequence[int]) -> list[Placement]:
    """Assign GPUs in turn to workers with these numbers of ranks."""
    first, taken = 0, []
    for size in sizes:
        taken.append([(first + rank) % len(gpus) for rank in range(size)])
        first += size
    load = Counter(index for indices in taken for index in indices)
    placements = []
    for indices in taken:
        others = [index for index in range(len(gpus)) if index not in indices]
        visible = ",".join(gpus[index] for index in [*indices, *others])
        own = tuple(gpus[index] for index in indices)
        placements.append(Placement(own, visible, max(load[index] for index in indices)))
    return placements
