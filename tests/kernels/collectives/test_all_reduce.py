"""Exchanges between ranks: two processes that map one file, through the interpreter; on GPUs two devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn import functional

from engine.gpu.steps.device_sampler import DeviceSampler
from engine.gpu.steps.rows import RowChanges
from engine.request import RequestId, SamplingParams
from engine.request_states import RequestState
from engine.tensor_parallel.gpu_group import VocabShards
from kernels.elementwise import rms_norm
from kernels.gpu.collectives.all_reduce import (
    GATHER_CHUNK,
    SymmetricMemory,
    all_gather,
    all_reduce_rms_norm,
    all_reduce_rms_norm_quantize,
    symmetric_bytes,
)
from kernels.gpu.quantization.quantize import quantize_rows
from tests.kernels.rank_processes import make_files, map_files, run_ranks

SIZE, ROWS, N, EPS = 2, 3, 40, 1e-5
GATHERED = GATHER_CHUNK + 10
VOCAB, NUM_GATHERS = 5001, 6
QUANTIZED = ((torch.int8, 1), (torch.int8, 2), (torch.float8_e4m3fn, 1))
STEPS = ((3, 40), (1, 40), (2, 24), (3, 40))  # rows and columns of exchanges that follow each other


def inputs(rank: int, step: int, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def open_segments(folder: Path, kind: str, rank: int, num_programs: int, width: int) -> SymmetricMemory:
    """Open symmetric memory as on GPUs, with files instead of descriptors."""
    count = symmetric_bytes(SIZE, num_programs, width, torch.bfloat16)
    addresses = [mapped.data_ptr() for mapped in map_files(folder, kind, SIZE, count)]
    counters = torch.zeros(num_programs, dtype=torch.int32)
    return SymmetricMemory(torch.tensor(addresses), counters, rank, SIZE, num_programs, width, torch.bfloat16)


class FileGroup:
    """The parts of a group that `VocabShards` needs."""

    def __init__(self, peers: SymmetricMemory) -> None:
        self.rank, self.size, self.dtype, self._peers = peers.rank, peers.size, peers.dtype, peers

    def all_gather(self, x: torch.Tensor, only: torch.Tensor | None = None) -> torch.Tensor:
        return all_gather(x, self._peers, only)


def sampled(sampler: DeviceSampler, logits: torch.Tensor) -> torch.Tensor:
    """Sample tokens of six rows: greedy, random, and with each kind of truncation."""
    params = [
        SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=2, top_k=5),
        SamplingParams(seed=3, top_p=0.5), SamplingParams(seed=4, min_p=0.2, temperature=0.7),
        SamplingParams(seed=5, top_k=300, top_p=0.9),
    ]  # fmt: skip
    states = [RequestState(RequestId(str(row)), [1], 1, each) for row, each in enumerate(params)]
    sampler.apply(RowChanges(fresh=list(enumerate(states))))
    return sampler.sample(logits, slice(6), torch.arange(6) + 1)


def vocab_logits() -> torch.Tensor:
    """Return logits (6, VOCAB); the last rank's part ends in one column of padding."""
    return (torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3)) * 2).to(torch.bfloat16)


def run_rank(folder: Path, rank: int) -> None:
    sums = open_segments(folder, "sum", rank, ROWS, N)
    gathers = open_segments(folder, "gather", rank, NUM_GATHERS, GATHER_CHUNK)
    per_rank = -(-VOCAB // SIZE)
    shards = VocabShards(cast(Any, FileGroup(gathers)), VOCAB)
    mine = functional.pad(vocab_logits(), (0, 1), value=99.0)[:, rank * per_rank : (rank + 1) * per_rank]
    found: list[Any] = [sampled(DeviceSampler(6, VOCAB, torch.device("cpu"), shards), mine)]
    for step, shape in enumerate(STEPS):
        residual = inputs(7, step, shape)
        weight = torch.linspace(0.5, 1.5, shape[1]).to(torch.bfloat16)
        normed = all_reduce_rms_norm(inputs(rank, step, shape), residual, weight, EPS, sums)
        logits = all_gather(inputs(rank, step, (shape[0], GATHERED)), gathers)
        quantized = [
            all_reduce_rms_norm_quantize(inputs(rank, step, shape), inputs(7, step, shape), weight, EPS, sums, *kind)
            for kind in QUANTIZED
        ]
        found.append((normed, residual, logits, quantized))
    torch.save(found, folder / f"found{rank}.pt")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it between devices")
def test_ranks_get_the_same_sums_and_all_columns(tmp_path: Path) -> None:
    for kind, programs, width in (("sum", ROWS, N), ("gather", NUM_GATHERS, GATHER_CHUNK)):
        make_files(tmp_path, kind, SIZE, symmetric_bytes(SIZE, programs, width, torch.bfloat16))
    run_ranks(run_rank, tmp_path, SIZE)
    first, second = (torch.load(tmp_path / f"found{rank}.pt") for rank in range(SIZE))
    tokens, others = first.pop(0), second.pop(0)
    assert torch.equal(tokens, others)
    assert torch.equal(tokens, sampled(DeviceSampler(6, VOCAB, torch.device("cpu")), vocab_logits()))
    for step, shape in enumerate(STEPS):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first[step][:3], second[step], strict=False))
        normed, residual, logits, quantized = first[step]
        for (values, scales), (dtype, planes) in zip(quantized, QUANTIZED, strict=True):
            expected, expected_scales = quantize_rows(normed, dtype, planes)
            assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
            assert torch.equal(scales, expected_scales)
        want = sum(inputs(rank, step, shape).float() for rank in (7, 0, 1))
        torch.testing.assert_close(residual.float(), want, rtol=8e-3, atol=1e-2)
        weight = torch.linspace(0.5, 1.5, shape[1]).to(torch.bfloat16)
        torch.testing.assert_close(normed, rms_norm(residual, weight, EPS), rtol=1e-2, atol=1e-2)
        parts = [inputs(rank, step, (shape[0], GATHERED)) for rank in range(SIZE)]
        assert torch.equal(logits, torch.cat(parts, dim=1))


def test_what_does_not_fit_is_refused() -> None:
    nothing = torch.zeros(SIZE, dtype=torch.int64)
    peers = SymmetricMemory(nothing, torch.zeros(2, dtype=torch.int32), 0, SIZE, 2, 16, torch.bfloat16)
    rows = torch.zeros(3, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="do not fit"):
        all_reduce_rms_norm(rows, rows.clone(), rows[0], EPS, peers)
    with pytest.raises(ValueError, match="do not fit"):
        all_gather(rows[:1], peers)
    with pytest.raises(ValueError, match="contiguous"):
        all_reduce_rms_norm(rows[:2, ::2], rows[:2, ::2], rows[0], EPS, peers)
