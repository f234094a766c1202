"""The same random numbers in each run of a test, whichever others its process has run before."""

from __future__ import annotations

import random
import sys

import pytest

SEED = 1234


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before fixtures of any scope draw some."""
    random.seed(SEED)
    if torch := sys.modules.get("torch"):  # not every test needs it
        torch.manual_seed(SEED)
