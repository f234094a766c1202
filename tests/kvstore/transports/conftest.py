"""A client that pulls into its own empty pool."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.transports.client import KvClient
from tests.kvstore.helpers import GEOMETRY, empty_pool, host_client


@pytest.fixture
def mine() -> np.ndarray:  # type: ignore[type-arg]
    return empty_pool()


@pytest.fixture
def client(mine: np.ndarray) -> Iterator[KvClient]:  # type: ignore[type-arg]
    client = host_client(GEOMETRY, mine, "secret")
    yield client
    client.close()
