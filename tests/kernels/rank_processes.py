"""Ranks as processes that map each other's files, as GPUs map each other's memory; kernels are interpreted."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests.harness.forked import fork
from tests.kernels.interpreter import take_short_cuts

KEPT: list[torch.Tensor] = []  # mappings, as long as the process lives
RunRank = Callable[[Path, int], None]

PRELOADED = ("engine.assembly", "engine.gpu.runner", "tests.kernels.interpreter")


def map_files(folder: Path, kind: str, size: int, num_bytes: int) -> list[torch.Tensor]:
    """Map the files of all ranks as uint8 tensors."""
    found = []
    for rank in range(size):
        with open(folder / f"{kind}{rank}", "r+b") as file:
            found.append(torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8))
    KEPT.extend(found)
    return found


def make_files(folder: Path, kind: str, size: int, num_bytes: int) -> None:
    """Write a file of zeros for each rank."""
    for rank in range(size):
        (folder / f"{kind}{rank}").write_bytes(bytes(num_bytes))


def run_ranks(run_rank: RunRank, folder: Path, size: int) -> None:
    """Run a module's function in a process for each rank, and wait until all have succeeded."""
    ranks: list[BaseProcess] = []
    try:
        for rank in range(size):
            ranks.append(fork(_run, run_rank, folder, rank, preloaded=PRELOADED))
        for process in ranks:
            process.join(280)
        assert [process.exitcode for process in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _run(run_rank: RunRank, folder: Path, rank: int) -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.set_num_threads(1)
    take_short_cuts()
    run_rank(folder, rank)
