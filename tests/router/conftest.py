"""The cluster that tests of a file share: one scripted decode worker, of which each test sees its own part."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.harness.router import Cluster, cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Cluster]:
    async with cluster() as made:
        yield made


@pytest.fixture
def c(shared: Cluster) -> Cluster:
    """Return the cluster for tests marked `asyncio(loop_scope="module")`."""
    for worker in shared.decode:
        worker.submits.clear()
        worker.cancels.clear()
    return shared
