"""The oracle of this folder's tests, and the cluster that the tests of a file share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mini_infer import LLM
    from tests.harness.cluster import Cluster


@pytest.fixture(scope="session")
def reference() -> LLM:
    """One engine without services, which other tests compare with transformers."""
    from mini_infer import LLM  # a wing, which core tests of this folder do without

    return LLM("dry-run", num_gpu_blocks=2048, num_threads=1)


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """Return the file's cluster with all workers running: those that the previous test killed are started again."""
    shared.start_killed()
    return shared
