"""The oracle of this folder's tests: one engine without services, which other tests compare with transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine import LLM


@pytest.fixture(scope="session")
def reference() -> LLM:
    from engine import LLM  # a wing, which core tests of this folder do without

    return LLM("dry-run", num_gpu_blocks=2048, num_threads=1)
