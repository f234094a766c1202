"""GEMMs of libraries are run with all numbers of rows before anything is served."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.gpu.gemm_warmup import sizes_to_warm, warm_up_gemms
from engine.loader.load import load_model
from tests.gpu.models import save_tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_each_shape_once_with_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(save_tiny_model(tmp_path))
    config = EngineConfig(path, device=DEVICE.type, dtype="float16", quant_mode="none").resolved(DEVICE.type)
    model = load_model(resolve_model(path), config, DEVICE).model
    found: Counter[tuple[tuple[int, ...], int]] = Counter()
    multiply = functional.linear

    def count(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found[tuple(weight.shape), x.shape[0]] += 1
        return multiply(x, weight, bias)

    monkeypatch.setattr(functional, "linear", count)
    warm_up_gemms(model, sizes_to_warm(1024, 1200), sizes_to_warm(64, 128))
    qkv, output, gate_up, down, head = (128, 64), (64, 64), (192, 64), (64, 96), (97, 64)
    sizes = [(shape, size) for shape in (qkv, output, gate_up, down) for size in (1088, 1152)]
    assert found == Counter([*sizes, (head, 128)])


def test_no_size_when_all_steps_are_captured() -> None:
    assert list(sizes_to_warm(1024, 1024)) == []
