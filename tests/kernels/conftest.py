"""Runs kernels compiled on a GPU, otherwise through Triton's interpreter.

The interpreter is chosen when triton is imported, for the whole process, so these tests need their own process.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.interpreter import take_short_cuts

    take_short_cuts()
torch.set_num_threads(1)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1234)
