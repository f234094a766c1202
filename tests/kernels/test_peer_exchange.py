"""Exchanges between ranks: two processes that map one file, through the interpreter; on GPUs two devices."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.gpu.peer_exchange import GATHER_CHUNK, PeerSegments, gather_columns, segment_bytes, sum_add_rms_norm
from kernels.rms_norm import rms_norm

SIZE, ROWS, N, EPS = 2, 3, 40, 1e-5
GATHERED = GATHER_CHUNK + 10
STEPS = ((3, 40), (1, 40), (2, 24), (3, 40))  # rows and columns of exchanges that follow each other


def inputs(rank: int, step: int, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def open_segments(folder: Path, kind: str, rank: int, num_programs: int, width: int) -> PeerSegments:
    """As on GPUs, with files instead of descriptors."""
    count = segment_bytes(SIZE, num_programs, width, torch.bfloat16)
    addresses = []
    for peer in range(SIZE):
        with open(folder / f"{kind}{peer}", "r+b") as file:
            mapped = torch.frombuffer(mmap.mmap(file.fileno(), count), dtype=torch.uint8)
        KEPT.append(mapped)
        addresses.append(mapped.data_ptr())
    counters = torch.zeros(num_programs, dtype=torch.int32)
    return PeerSegments(torch.tensor(addresses), counters, rank, SIZE, num_programs, width, torch.bfloat16)


KEPT: list[torch.Tensor] = []  # mappings, as long as the process lives


def run_rank(folder: Path, rank: int) -> None:
    sums = open_segments(folder, "sum", rank, ROWS, N)
    gathers = open_segments(folder, "gather", rank, 2 * ROWS, GATHER_CHUNK)
    found = []
    for step, shape in enumerate(STEPS):
        residual = inputs(7, step, shape)
        weight = torch.linspace(0.5, 1.5, shape[1]).to(torch.bfloat16)
        normed = sum_add_rms_norm(inputs(rank, step, shape), residual, weight, EPS, sums)
        logits = gather_columns(inputs(rank, step, (shape[0], GATHERED)), gathers)
        found.append((normed, residual, logits))
    torch.save(found, folder / f"found{rank}.pt")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it between devices")
def test_ranks_get_the_same_sums_and_all_columns(tmp_path: Path) -> None:
    for kind, programs, width in (("sum", ROWS, N), ("gather", 2 * ROWS, GATHER_CHUNK)):
        for rank in range(SIZE):
            (tmp_path / f"{kind}{rank}").write_bytes(bytes(segment_bytes(SIZE, programs, width, torch.bfloat16)))
    command = [sys.executable, "-m", "tests.kernels.test_peer_exchange", str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(SIZE)]
    try:
        assert [process.wait(100) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    first, second = (torch.load(tmp_path / f"found{rank}.pt") for rank in range(SIZE))
    for step, shape in enumerate(STEPS):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first[step], second[step], strict=True))
        normed, residual, logits = first[step]
        want = sum(inputs(rank, step, shape).float() for rank in (7, 0, 1))
        torch.testing.assert_close(residual.float(), want, rtol=8e-3, atol=1e-2)
        weight = torch.linspace(0.5, 1.5, shape[1]).to(torch.bfloat16)
        torch.testing.assert_close(normed, rms_norm(residual, weight, EPS), rtol=1e-2, atol=1e-2)
        parts = [inputs(rank, step, (shape[0], GATHERED)) for rank in range(SIZE)]
        assert torch.equal(logits, torch.cat(parts, dim=1))


def test_what_does_not_fit_is_refused() -> None:
    nothing = torch.zeros(SIZE, dtype=torch.int64)
    peers = PeerSegments(nothing, torch.zeros(2, dtype=torch.int32), 0, SIZE, 2, 16, torch.bfloat16)
    rows = torch.zeros(3, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="do not fit"):
        sum_add_rms_norm(rows, rows.clone(), rows[0], EPS, peers)
    with pytest.raises(ValueError, match="do not fit"):
        gather_columns(rows[:1], peers)
    with pytest.raises(ValueError, match="contiguous"):
        sum_add_rms_norm(rows[:2, ::2], rows[:2, ::2], rows[0], EPS, peers)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]))
