"""Runs the GPU engine with compiled kernels on a GPU, otherwise interpreted, in a separate process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.interpreter import take_short_cuts

    take_short_cuts()
from engine.gpu.runner import GpuRunner
from kernels.gpu.few_rows.gemm_configs import GemmTable, GemvConfig
from kernels.gpu.tuning import Rule
from tests.gpu.models import save_tiny_model
from tests.gpu.row_kernels import compute_rows_at_once

torch.set_num_threads(1)
_WARMED_UP: set[Path] = set()  # files of which a test has had engines that warmed up


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use few large programs if kernels are interpreted: their cost hardly depends on their size.

    tests/kernels interprets kernels with the settings of a GPU.
    """
    if torch.cuda.is_available():
        return
    one_row = GemmTable(Rule(GemvConfig(128, 128, num_warps=1, num_stages=1)))
    for module in "one_row", "gemms":
        monkeypatch.setattr(f"engine.few_rows.{module}.FUSED_GEMV", one_row)
    monkeypatch.setattr("kernels.gpu.quantization.packed_gemm.DEQUANTIZED_ROWS", 1024)
    monkeypatch.setattr("kernels.gpu.attention.kv_splits.COMBINE_PROGRAMS", 0)
    compute_rows_at_once(monkeypatch)


@pytest.fixture(autouse=True)
def _first_test_of_a_file_warms_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels need no warm-up, which took a third of the time; tests/compile tests what it launches."""
    if torch.cuda.is_available():
        return
    warm_up, is_done = GpuRunner._run_warmup_plans, request.path in _WARMED_UP

    def warm_up_once(runner: GpuRunner) -> None:
        _WARMED_UP.add(request.path)
        if not is_done:
            warm_up(runner)

    monkeypatch.setattr(GpuRunner, "_run_warmup_plans", warm_up_once)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, which no test may change."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))
