"""How much memory KV blocks get, from measured numbers; the steps that are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from common.errors import ConfigError
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.gpu.failures import explained
from engine.gpu.memory import DRIVER_BYTES, TRIAL_BLOCKS, MemoryUse, decode_trial, kv_bytes, prefill_trials

GB = 1_000_000_000
ALONE = MemoryUse(total_bytes=100 * GB, free_bytes=83 * GB, process_bytes=16 * GB, peak_bytes=20 * GB, graph_bytes=GB)
CONFIG = EngineConfig(block_size=16, max_num_seqs=8, max_num_batched_tokens=100)


def test_alone_a_worker_gets_its_share_of_the_whole_gpu() -> None:
    assert kv_bytes(ALONE, 0.9, 1000) == 90 * GB - 20 * GB - GB - DRIVER_BYTES
    assert kv_bytes(ALONE, 0.5, 1000) == 50 * GB - 20 * GB - GB - DRIVER_BYTES


def test_a_neighbour_within_its_own_share_takes_nothing_away() -> None:
    beside = replace(ALONE, free_bytes=ALONE.free_bytes - 45 * GB)
    assert kv_bytes(beside, 0.45, 1000) == kv_bytes(ALONE, 0.45, 1000)


def test_no_more_than_what_is_free_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    beside = replace(ALONE, free_bytes=30 * GB)
    assert kv_bytes(beside, 0.9, 1000) == 30 * GB - 4 * GB - GB
    assert "other processes hold GPU memory" in caplog.text


@pytest.mark.parametrize(
    ("use", "fraction"),
    [(ALONE, 0.21), (replace(ALONE, free_bytes=4 * GB), 0.9), (replace(ALONE, peak_bytes=95 * GB), 0.9)],
)  # fmt: skip
def test_without_room_the_message_has_the_numbers(use: MemoryUse, fraction: float) -> None:
    with pytest.raises(ConfigError, match=rf"of 100.0 GB, --gpu-memory-fraction {fraction} .* GB are free"):
        kv_bytes(use, fraction, 1000)


@pytest.fixture
def gpu_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GB // 2, 24 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 23 * GB)


NUMBERS = r"24\.0 GB in all, 23\.0 GB held by this worker, 0\.5 GB free\. "


def broken_capture() -> None:
    """As where a graph is captured: what ends the capture hides what broke it off."""
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def fail_with(message: str) -> None:
    raise RuntimeError(message)


@pytest.mark.usefixtures("gpu_numbers")
@pytest.mark.parametrize(
    ("where", "advice"),
    [
        ("engine.loader.load.load_model", "The weights do not fit"),
        ("engine.kv.memory.allocate_pool", "Lower --gpu-memory-fraction"),
        ("engine.assembly._make_runner", "Lower --gpu-memory-fraction"),
        ("engine.cpu.runner.CpuRunner.warmup", "Lower --gpu-memory-fraction"),
    ],
)
@pytest.mark.parametrize(
    "fail",
    [
        broken_capture,
        partial(fail_with, "CUDA error: out of memory"),
        partial(fail_with, "Triton Error [CUDA]: out of memory"),
        partial(fail_with, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["capture", "driver", "triton", "cublas"],
)
def test_memory_that_ends_while_starting_is_one_message_with_numbers(
    where: str, advice: str, fail: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, lambda *_arguments: fail())
    with pytest.raises(ConfigError, match=NUMBERS + advice):
        assemble(EngineConfig("dry-run", device="cpu"))


def test_a_gpu_that_others_hold_whole_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", partial(fail_with, "CUDA error: out of memory"))
    with pytest.raises(ConfigError, match="no memory left at all"), explained("advice"):
        fail_with("CUDA error: out of memory")


def test_other_failures_pass_and_a_missing_compiler_is_named() -> None:
    with pytest.raises(RuntimeError, match="a bug"), explained("advice"):
        fail_with("a bug")
    with pytest.raises(ConfigError, match="install gcc"), explained("advice"):
        fail_with("Failed to find C compiler. Please specify via CC environment variable.")


def test_trials_fill_every_bound_of_a_step() -> None:
    many, longest = prefill_trials(CONFIG, max_model_len=1000)
    assert [row.num_tokens for row in many.rows] == [12] * 8
    (row,) = longest.rows
    assert (row.start, row.num_tokens) == (899, 100)
    for plan in (many, longest, decode_trial(CONFIG)):
        for new, row in zip(plan.new, plan.rows, strict=True):
            assert row.samples
            assert len(new.token_ids) == row.stop < 1000
            assert len(row.new_block_ids) == -(-row.stop // 16)
            assert max(row.new_block_ids) < TRIAL_BLOCKS
    assert [row.num_tokens for row in decode_trial(CONFIG).rows] == [1] * 8


def test_trials_of_short_models_stay_inside_the_model() -> None:
    for plan in prefill_trials(replace(CONFIG, max_num_seqs=1), max_model_len=50):
        (row,) = plan.rows
        assert (row.start, row.num_tokens) == (0, 49)
