"""Ranks as processes that map each other's files, as GPUs map each other's memory; kernels are interpreted."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import torch

KEPT: list[torch.Tensor] = []  # mappings, as long as the process lives


def map_files(folder: Path, kind: str, size: int, num_bytes: int) -> list[torch.Tensor]:
    """Memory of all ranks, uint8."""
    found = []
    for rank in range(size):
        with open(folder / f"{kind}{rank}", "r+b") as file:
            found.append(torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8))
    KEPT.extend(found)
    return found


def make_files(folder: Path, kind: str, size: int, num_bytes: int) -> None:
    """Zeros for all ranks."""
    for rank in range(size):
        (folder / f"{kind}{rank}").write_bytes(bytes(num_bytes))


def run_ranks(module: str, folder: Path, size: int) -> None:
    """Run `python -m module folder rank` for each rank, to its end."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(size)]
    try:
        assert [process.wait(280) for process in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()
            process.wait()
