"""Error messages when GPU memory runs out, or a compiler is missing, while an engine starts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from common.errors import ConfigError
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.start_failures.explained import explained

GB = 1_000_000_000


@pytest.fixture
def gpu_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GB // 2, 24 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 23 * GB)


NUMBERS = r"24\.0 GB in all, 23\.0 GB held by this worker, 0\.5 GB free\. "


def broken_capture() -> None:
    """Fail as graph capture does: the error of ending the capture hides the original one."""
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
