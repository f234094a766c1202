"""A cluster of stand-in services, for tests of starting, restarting and stopping them."""

import pytest

from tests.cli.cluster.stand_ins import Cluster
from tests.harness.processes import is_alive
from tests.harness.waiting import wait_until


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path / "events")
    yield made
    pids = [pid for _, pid in [*made.events("start"), *made.events("child")]]
    wait_until(lambda: not any(map(is_alive, pids)))  # the kernel ends a dead parent's child, a moment later
